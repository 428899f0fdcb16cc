"""Graphs for tests: a maker, a synthetic transformer, chains, and random small graphs.

No torch here: sizes and times follow a simple device (flop/s and bytes/s), which is enough to test
everything that finds orders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from planner.instance import Instance
from planner.minimum import unavoidable_peak
from planner.problem import Problem
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.graph import ComputationGraph, Kind, Operation, Phase, Value


class GraphMaker:
    """Adds values and operations one after the other; `graph()` checks and returns the graph."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.values: list[Value] = []

    def value(
        self, nbytes: int, kind: Kind = Kind.RESIDENT, producer: int | None = None, name: str = ""
    ) -> int:
        index = len(self.values)
        self.values.append(Value(index, name or f"v{index}", nbytes, kind, producer))
        return index

    def op(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        time_ns: int = 1,
        backward: bool = False,
        kinds: Sequence[Kind] = (),
        workspace: int = 0,
        recomputable: bool | None = None,
        state_bytes: int | None = None,
        name: str = "op",
        module: str = "",
    ) -> tuple[int, ...]:
        """Adds an operation whose outputs have the given sizes; returns the new values."""
        index = len(self.operations)
        usual = Kind.TEMPORARY if backward else Kind.ACTIVATION
        made = tuple(
            self.value(nbytes, kinds[i] if i < len(kinds) else usual, index, f"{name}{index}.{i}")
            for i, nbytes in enumerate(outputs)
        )
        state = None
        if state_bytes is not None:
            state = self.value(state_bytes, Kind.STATE, index, f"{name}{index}.state")
        self.operations.append(
            Operation(
                index=index,
                name=f"{name}{index}",
                target=name,
                phase=Phase.BACKWARD if backward else Phase.FORWARD,
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=made,
                time_ns=time_ns,
                workspace=workspace,
                recomputable=not backward if recomputable is None else recomputable,
                state=state,
                module=module,
            )
        )
        return made

    def graph(self, fixed: int = 0, *, accumulate: bool = False) -> ComputationGraph:
        return ComputationGraph(
            tuple(self.operations), tuple(self.values), (("fixed", fixed),), accumulate
        )


def chain_graph(
    length: int, *, size: int = 10, time_ns: int = 10, inner: int = 0, fixed: int = 0
) -> ComputationGraph:
    """A chain of equal layers; each backward operation reads its layer's input.

    `inner` > 0 gives each layer that many extra elementwise operations that backward reads too.
    """
    m = GraphMaker()
    x = m.value(0)
    reads: list[list[int]] = []
    for layer in range(length):
        needed = [x]
        for _ in range(inner):
            (x,) = m.op([x], [size], time_ns=time_ns // 5, name="act", module=f"layers.{layer}")
            needed.append(x)
        (x,) = m.op([x], [size], time_ns=time_ns, name="mm", module=f"layers.{layer}")
        reads.append(needed)
    (loss,) = m.op([x], [0], kinds=[Kind.OUTPUT], time_ns=1, name="loss")
    tangent = m.value(0, Kind.TANGENT)
    (g,) = m.op([tangent, x], [size], backward=True, time_ns=1, name="loss_backward")
    del loss
    for layer in range(length - 1, -1, -1):
        for v in reversed(reads[layer]):
            (g,) = m.op(
                [g, v],
                [size],
                backward=True,
                time_ns=2 * time_ns,
                name="back",
                module=f"layers.{layer}",
            )
    return m.graph(fixed)


class _Transformer:
    """Writes one BERT-like encoder, forward then backward, with roofline times."""

    def __init__(
        self, batch: int, seq: int, hidden: int, heads: int, flops: float, bandwidth: float
    ) -> None:
        self.m = GraphMaker()
        self.tokens = batch * seq
        self.hidden = hidden
        self.act = 4 * self.tokens * hidden
        self.score = 4 * batch * heads * seq * seq
        self.seq, self.heads, self.batch = seq, heads, batch
        self.flops, self.bandwidth = flops, bandwidth
        self.tape: list[tuple[str, dict[str, int], int]] = []

    def ns(self, nbytes: float, flop: float = 0.0) -> int:
        return 2000 + int(1e9 * max(flop / self.flops, nbytes / self.bandwidth))

    def mm(self, x: int, fan_in: int, fan_out: int, where: str) -> int:
        w = self.m.value(4 * fan_in * fan_out)
        out = 4 * self.tokens * fan_out
        t = self.ns(out + 4 * self.tokens * fan_in, 2.0 * self.tokens * fan_in * fan_out)
        (y,) = self.m.op([x, w], [out], time_ns=t, name="mm", module=where)
        self.tape.append(("mm", {"x": x, "w": w, "y": y, "in": fan_in, "t": t}, y))
        return y

    def bmm(self, a: int, b: int, out: int, where: str) -> int:
        t = self.ns(self.score, 2.0 * self.tokens * self.seq * self.hidden)
        (y,) = self.m.op([a, b], [out], time_ns=t, name="bmm", module=where)
        self.tape.append(("bmm", {"a": a, "b": b, "y": y, "t": t}, y))
        return y

    def unary(self, name: str, x: int, size: int, saves: str, where: str) -> int:
        t = self.ns(2 * size)
        (y,) = self.m.op([x], [size], time_ns=t, name=name, module=where)
        self.tape.append((name, {"x": x, "y": y, "s": x if saves == "x" else y, "t": t}, y))
        return y

    def dropout(self, x: int, size: int, where: str) -> int:
        t = self.ns(2.25 * size)
        y, mask = self.m.op(
            [x], [size, size // 4], time_ns=t, state_bytes=16, name="dropout", module=where
        )
        self.tape.append(("dropout", {"x": x, "y": y, "s": mask, "t": t}, y))
        return y

    def add(self, a: int, b: int, where: str) -> int:
        t = self.ns(3 * self.act)
        (y,) = self.m.op([a, b], [self.act], time_ns=t, name="add", module=where)
        self.tape.append(("add", {"a": a, "b": b, "y": y, "t": 0}, y))
        return y

    def norm(self, x: int, where: str) -> int:
        w = self.m.value(4 * self.hidden)
        t = self.ns(2 * self.act)
        y, mean, rstd = self.m.op(
            [x, w],
            [self.act, 4 * self.tokens, 4 * self.tokens],
            time_ns=t,
            name="layer_norm",
            module=where,
        )
        self.tape.append(("norm", {"x": x, "y": y, "mean": mean, "rstd": rstd, "t": t}, y))
        return y

    def layer(self, x: int, where: str) -> int:
        h, att = self.hidden, f"{where}.attention"
        q, k, v = (self.mm(x, h, h, att) for _ in range(3))
        scores = self.bmm(q, k, self.score, att)
        scores = self.unary("scale", scores, self.score, "none", att)
        probs = self.unary("softmax", scores, self.score, "y", att)
        probs = self.dropout(probs, self.score, att)
        y = self.mm(self.bmm(probs, v, self.act, att), h, h, att)
        x = self.norm(self.add(self.dropout(y, self.act, att), x, att), att)
        mlp = f"{where}.mlp"
        y = self.unary("gelu", self.mm(x, h, 4 * h, mlp), 4 * self.act, "x", mlp)
        y = self.dropout(self.mm(y, 4 * h, h, mlp), self.act, mlp)
        return self.norm(self.add(y, x, mlp), mlp)

    def backward(self, grads: dict[int, int]) -> None:
        """Replays the tape; `grads` maps forward values to their gradients."""
        for name, a, y in reversed(self.tape):
            g = grads.pop(y)
            t, size = a["t"], self.m.values
            if name == "mm":
                x, w = a["x"], a["w"]
                self.m.op(
                    [x, g],
                    [size[w].nbytes],
                    kinds=[Kind.GRADIENT],
                    backward=True,
                    time_ns=t,
                    name="mm_dw",
                )
                self._give(grads, x, [w, g], t)
            elif name == "bmm":
                self._give(grads, a["a"], [a["b"], g], t)
                self._give(grads, a["b"], [a["a"], g], t)
            elif name == "add":
                grads[a["a"]] = g
                self._accumulate(grads, a["b"], g)
            elif name == "norm":
                dx, _ = self.m.op(
                    [g, a["x"], a["mean"], a["rstd"]],
                    [self.act, 4 * self.hidden],
                    kinds=[Kind.TEMPORARY, Kind.GRADIENT],
                    backward=True,
                    time_ns=2 * t,
                    name="norm_backward",
                )
                self._accumulate(grads, a["x"], dx)
            else:
                reads = [g] if name == "scale" else [g, a["s"]]
                self._give(grads, a["x"], reads, 2 * t)

    def _give(self, grads: dict[int, int], x: int, reads: list[int], t: int) -> None:
        nbytes = self.m.values[x].nbytes
        (dx,) = self.m.op(reads, [nbytes], backward=True, time_ns=t, name="dx")
        self._accumulate(grads, x, dx)

    def _accumulate(self, grads: dict[int, int], x: int, dx: int) -> None:
        if x in grads:
            nbytes = self.m.values[x].nbytes
            (dx,) = self.m.op(
                [grads[x], dx], [nbytes], backward=True, time_ns=self.ns(3 * nbytes), name="add"
            )
        grads[x] = dx


def transformer_graph(
    layers: int = 24,
    *,
    batch: int = 8,
    seq: int = 512,
    hidden: int = 1024,
    heads: int = 16,
    vocabulary: int = 30_522,
    flops: float = 12.6e12,
    bandwidth: float = 720e9,
    accumulate: bool = False,
) -> ComputationGraph:
    """A BERT-like model with post-norm layers, a head over the vocabulary and a loss."""
    t = _Transformer(batch, seq, hidden, heads, flops, bandwidth)
    m = t.m
    ids = m.value(8 * t.tokens)
    table = m.value(4 * vocabulary * hidden)
    (x,) = m.op([ids, table], [t.act], time_ns=t.ns(2 * t.act), name="embedding")
    start = len(t.tape)
    x = t.norm(x, "embeddings")
    for i in range(layers):
        x = t.layer(x, f"layers.{i}")
    logits = t.mm(x, hidden, vocabulary, "head")
    size = m.values[logits].nbytes
    (logp,) = m.op([logits], [size], time_ns=t.ns(2 * size), name="log_softmax", module="head")
    m.op([logp, ids], [512], kinds=[Kind.OUTPUT], time_ns=2000, name="nll", module="head")
    tangent = m.value(512, Kind.TANGENT)
    (g,) = m.op([tangent, ids], [size], backward=True, time_ns=t.ns(size), name="nll_backward")
    (g,) = m.op([g, logp], [size], backward=True, time_ns=t.ns(3 * size), name="logp_backward")
    assert start == 0
    grads = {logits: g}
    t.backward(grads)
    (g,) = grads.values()
    m.op(
        [g, ids],
        [4 * vocabulary * hidden],
        kinds=[Kind.GRADIENT],
        backward=True,
        time_ns=t.ns(2 * t.act),
        name="embedding_backward",
    )
    fixed = sum(v.nbytes for v in m.values if v.producer is None and v.kind is Kind.RESIDENT)
    return m.graph(fixed, accumulate=accumulate)


_COSTS = st.one_of(st.integers(0, 9), st.integers(100, 1000))


@st.composite
def small_graphs(draw: st.DrawFn, max_forward: int = 6, max_backward: int = 5) -> ComputationGraph:
    """Random graphs: skips, several outputs, operations that may not run again, random state,
    resident inputs, outputs, tangents, gradients, wide costs, with and without accumulation."""
    m = GraphMaker()
    known = [m.value(draw(_COSTS))]
    forward: list[int] = []
    for _ in range(draw(st.integers(1, max_forward))):
        inputs = draw(st.lists(st.sampled_from(known[-4:]), min_size=1, max_size=2))
        sizes = draw(st.lists(_COSTS, min_size=1, max_size=2))
        made = m.op(
            inputs,
            sizes,
            time_ns=draw(_COSTS),
            workspace=draw(st.sampled_from([0, 0, 7])),
            recomputable=draw(st.sampled_from([True, True, True, False])),
            state_bytes=draw(st.sampled_from([None, None, 3])),
            kinds=[draw(st.sampled_from([Kind.ACTIVATION] * 5 + [Kind.OUTPUT])) for _ in sizes],
        )
        known += made
        forward += made
    known = [*forward, m.value(draw(_COSTS), Kind.TANGENT)]
    recent = known[-1:]
    kinds = st.sampled_from([Kind.TEMPORARY, Kind.TEMPORARY, Kind.GRADIENT])
    for _ in range(draw(st.integers(1, max_backward))):
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
        sizes = draw(st.lists(_COSTS, min_size=1, max_size=2))
        made = m.op(
            [*inputs, recent[-1]],
            sizes,
            backward=True,
            time_ns=draw(_COSTS),
            workspace=draw(st.sampled_from([0, 0, 7])),
            kinds=[draw(kinds) for _ in sizes],
        )
        free = [v for v in made if m.values[v].kind is Kind.TEMPORARY]
        recent += free
        known += free
    return m.graph(draw(_COSTS), accumulate=draw(st.booleans()))


@st.composite
def small_problems(
    draw: st.DrawFn, *, wishes: bool = True, max_forward: int = 6, max_backward: int = 5
) -> Problem:
    """Small graphs at budgets between what no schedule can avoid and what saving all needs, also
    a little below; with `wishes` sometimes values to keep or to make again."""
    graph = draw(small_graphs(max_forward, max_backward))
    most = simulate(graph, Schedule.from_order(graph, save_all_order(graph))).peak_bytes
    least = unavoidable_peak(Instance(Problem(graph, 0)))
    budget = draw(st.integers(max(0, least - 2), most))
    index = st.integers(0, len(graph.values) - 1)
    chosen = st.frozensets(index, max_size=2) if wishes else st.just(frozenset[int]())
    return Problem(graph, budget, draw(chosen), draw(chosen))


def renamed(graph: ComputationGraph, order: Sequence[int]) -> ComputationGraph:
    """The same graph with other names, and its values numbered in another order."""
    place = {v: i for i, v in enumerate(order)}
    operations = tuple(
        dataclasses.replace(
            op,
            name=f"renamed{op.index}",
            inputs=tuple(place[v] for v in op.inputs),
            outputs=tuple(place[v] for v in op.outputs),
            state=None if op.state is None else place[op.state],
        )
        for op in graph.operations
    )
    values = tuple(
        dataclasses.replace(graph.values[v], index=i, name=f"value{i}") for i, v in enumerate(order)
    )
    return ComputationGraph(operations, values, graph.fixed_bytes, graph.accumulate)
