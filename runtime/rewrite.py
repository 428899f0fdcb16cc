"""Rewrites the joint fx graph into a forward graph and backward slices that run one schedule.

The forward graph ends with the values to save; each slice of the backward pass takes the live
values, runs its part of the schedule (recomputing right where the schedule says so), and returns
the gradients completed there and the values that later slices need. Views are no operations of the
schedule: they are made again wherever they are read. Every graph is linted, and the operations it
calls are compared with the schedule.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from runtime.bindings import call_directly
from runtime.schedule import (
    Boundary,
    Compute,
    Deliver,
    Free,
    Schedule,
    ScheduleError,
    Step,
    reads,
    writes,
)
from runtime.torch_private import BoxedCodeGen, run_and_save_rng_state, run_with_rng_state
from tracer.extract import StepGraph, state_bytes

SCHEDULE_STEP = "schedule_step"
"""Key in a node's `meta`: the step of the schedule that it runs."""

STATE_BYTES = "state_bytes"
"""Key in the `meta` of a placeholder that takes a random-number state: how long it is."""


class Callee(Protocol):
    """What runs a graph: the graph module itself, or what it was lowered to."""

    def forward(self, args: list[Any]) -> Any:
        """Takes the inputs in a list, which it empties."""
        ...


def graph_of(callee: Callee) -> fx.GraphModule:
    """The graph that it runs, operation by operation."""
    graph = callee if isinstance(callee, fx.GraphModule) else getattr(callee, "module", None)
    assert isinstance(graph, fx.GraphModule)
    return graph


@dataclass(frozen=True)
class Slice:
    """A part of the backward pass.

    `function(live)` takes the list `inputs` (values) and returns (gradients, next slice's inputs).
    `primals` says whose gradients they are; `others` are primals that get none, and would get
    theirs at about this point if other tangents arrived.
    """

    function: Callee
    inputs: tuple[int, ...]
    primals: tuple[int, ...]
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rewritten:
    """Graphs that run one schedule.

    `forward(primals)` returns the forward outputs followed by the values `saved`; those at the
    positions `kept` are tensors over memory that is saved, too.
    """

    forward: Callee
    num_outputs: int
    saved: tuple[int, ...]
    slices: tuple[Slice, ...]
    kept: tuple[int, ...] = ()


def rewrite(step: StepGraph, schedule: Schedule) -> Rewritten:
    """The graphs that run `schedule`, checked."""
    at = next(i for i, s in enumerate(schedule.steps) if isinstance(s, Boundary))
    forward_steps, backward_steps = schedule.steps[:at], schedule.steps[at + 1 :]
    live = _Liveness(step, schedule)
    forward, saved = _forward(step, forward_steps, live, at)
    slices = tuple(_slices(step, backward_steps, live, at + 1, saved))
    outputs = step.joint.outputs
    kept = tuple(i for i, n in enumerate(outputs) if _is_kept(step, n, saved))
    result = Rewritten(forward, len(outputs), saved, slices, kept)
    _check(step, schedule, result)
    return result


def _is_kept(step: StepGraph, output: Any, saved: tuple[int, ...]) -> bool:
    """Whether an output of forward is a tensor over memory that is saved."""
    val = output.meta.get("val") if isinstance(output, fx.Node) else None
    strided = isinstance(val, torch.Tensor) and val.layout is torch.strided
    return strided and step.value_of.get(output) in saved


class _Liveness:
    """When values are read and made along a schedule.

    `needed[n]` are the values that something reads (or hands over) after step n before making them
    again, for the steps where a graph ends: the boundary and the deliveries.
    """

    def __init__(self, step: StepGraph, schedule: Schedule) -> None:
        self.rerun = set(schedule.recomputed)
        self.again = _run_again(schedule)
        self.last_read: dict[int, int] = {}
        self.events: dict[int, list[tuple[int, bool]]] = {}
        self.needed: dict[int, tuple[int, ...]] = {}
        needed: set[int] = set()
        for number in range(len(schedule.steps) - 1, -1, -1):
            item = schedule.steps[number]
            if isinstance(item, Compute):
                op = step.graph.operations[item.op]
                made = writes(op, again=self.again[number])
                read = reads(op, again=self.again[number])
                needed.difference_update(made)
                needed.update(read)
                for v in made:
                    self.events.setdefault(v, []).append((number, False))
                for v in read:
                    self.events.setdefault(v, []).append((number, True))
                    self.last_read.setdefault(v, number)
            elif not isinstance(item, Free):
                self.needed[number] = tuple(sorted(needed))
                needed.update(item.values if isinstance(item, Deliver) else ())

    def read_after(self, value: int, number: int) -> bool:
        """Whether something reads this instance of the value, made at step `number`."""
        later = [is_read for at, is_read in self.events.get(value, ()) if at > number]
        return bool(later) and later[-1]  # events are listed from last to first


def _run_again(schedule: Schedule) -> dict[int, bool]:
    """For each `Compute` step whether its operation has run before."""
    runs: set[int] = set()
    again: dict[int, bool] = {}
    for number, item in enumerate(schedule.steps):
        if isinstance(item, Compute):
            again[number] = item.op in runs
            runs.add(item.op)
    return again


class _Emitter:
    """Builds one fx graph, step by step."""

    def __init__(self, step: StepGraph, live: _Liveness) -> None:
        self.step, self.live = step, live
        self.graph = fx.Graph()
        self.graph.set_codegen(BoxedCodeGen())
        self.env: dict[fx.Node, fx.Node] = {}  # joint node -> its copy here
        self.of_value: dict[int, list[fx.Node]] = {}  # value -> joint nodes in `env`
        self.states: dict[int, fx.Node] = {}  # random-number states
        self.called: list[int] = []

    def placeholder(self, value: int) -> None:
        """Takes a value as an input of the graph."""
        owner = self.step.owners[value]
        if owner is None:
            self.states[value] = state = self.graph.placeholder(f"state_{value}")
            drawn = self.step.op_nodes[_producer(self.step, value)]
            assert drawn is not None
            state.meta[STATE_BYTES] = state_bytes(drawn)
            return
        node = self.graph.placeholder(owner.name)
        node.meta.update(owner.meta)
        self._bind(owner, node)

    def primal(self, primal: fx.Node) -> None:
        node = self.graph.placeholder(primal.name)
        node.meta.update(primal.meta)
        self._bind(primal, node)

    def value(self, value: int) -> fx.Node:
        """The node here that owns the value."""
        owner = self.step.owners[value]
        return self.states[value] if owner is None else self.env[owner]

    def load(self, node: fx.Node) -> fx.Node:
        """The copy of a joint node; views are made again from the value they look at."""
        zeros = self.step.zeros
        if node in self.env:
            return self.env[node]
        if node in zeros.alias:
            return self.load(zeros.alias[node])
        if node in zeros.zero:
            return self._bind(node, self._zero(node))
        if node.op == "get_attr":
            return self._bind(node, self.graph.node_copy(node))
        if node.op != "call_function" or node in self.step.op_index:
            raise ScheduleError(f"{node.name} is read but not held")
        return self._bind(node, self._copy(node))

    def _copy(self, node: fx.Node) -> fx.Node:
        return call_directly(self.graph.node_copy(node, self.load))

    def compute(self, number: int, index: int) -> None:
        """Emits one call."""
        node = self.step.op_nodes[index]
        self.called.append(index)
        if node is None or node in self.step.zeros.zero or node in self.step.zeros.alias:
            return
        op = self.step.graph.operations[index]
        again = self.live.again[number]
        if index in self.step.protective and not again and not self._reread(index, number):
            self._bind(node, self.load(_only(node.all_input_nodes)))
            return
        for v in op.outputs:
            self.forget(v)
        if op.state is not None and index in self.live.rerun:
            call = self._random_call(node, op.state, again)
        else:
            call = self._copy(node)
        self._where_it_starts(call).meta[SCHEDULE_STEP] = number
        self._outputs(node, call, number)

    def _where_it_starts(self, call: fx.Node) -> fx.Node:
        """The node that does the work: a random operation's results are taken out of a pair."""
        if call.target is not operator.getitem:
            return call
        pair = call.args[0]
        assert isinstance(pair, fx.Node)
        return pair

    def forget(self, value: int) -> None:
        """Drops what is known of a value: it is gone, or about to be made anew."""
        for node in self.of_value.pop(value, ()):
            self.env.pop(node, None)

    def output(self, result: Any) -> fx.GraphModule:
        self.graph.output(result)
        module = fx.GraphModule(self.step.joint.module, self.graph)
        module.graph.lint()
        return module

    def _reread(self, index: int, number: int) -> bool:
        """Whether a protective copy is read in the backward pass."""
        boundary = self.step.graph.boundary
        value = self.step.graph.operations[index].outputs[0]
        last = self.live.last_read.get(value, number)
        return last > number and (
            any(c >= boundary for c in self.step.graph.consumers[value])
            or any(c in self.live.rerun for c in self.step.graph.consumers[value])
        )

    def _random_call(self, node: fx.Node, state: int, again: bool) -> fx.Node:
        args: tuple[Any, ...] = (node.target, *fx.map_arg(node.args, self.load))
        kwargs = dict(fx.map_arg(node.kwargs, self.load))
        if again:
            call = self.graph.call_function(run_with_rng_state, (self.states[state], *args), kwargs)
            call.meta.update(node.meta)
            return call
        pair = self.graph.call_function(run_and_save_rng_state, args, kwargs)
        self.states[state] = self.graph.call_function(operator.getitem, (pair, 0))
        call = self.graph.call_function(operator.getitem, (pair, 1))
        call.meta.update(node.meta)
        return call

    def _outputs(self, node: fx.Node, call: fx.Node, number: int) -> None:
        """Takes a call's results apart at once, so that unread ones are freed at once."""
        if not isinstance(node.meta.get("val"), (tuple, list)):
            self._bind(node, call)
            return
        wanted = {
            n for n in (*self.step.joint.outputs, *self.step.joint.gradients) if n is not None
        }
        for element in node.users:
            if element.target is not operator.getitem:
                raise ScheduleError(f"{element.name} takes all results of {node.name} at once")
            value = self.step.value_of.get(element)
            if value is None:
                continue
            if self.live.read_after(value, number) or self._leaves(element, wanted):
                copy = self.graph.call_function(operator.getitem, (call, element.args[1]))
                copy.meta.update(element.meta)
                self._bind(element, copy)

    def _leaves(self, element: fx.Node, wanted: set[fx.Node]) -> bool:
        """Whether the graph's caller receives the value: an output of forward, or a gradient."""
        value = self.step.value_of[element]
        return any(self.step.value_of.get(n) == value for n in wanted if isinstance(n, fx.Node))

    def _zero(self, node: fx.Node) -> fx.Node:
        val = node.meta["val"]
        zero = self.graph.call_function(
            torch.ops.aten.full.default,
            (list(val.shape), 0),
            {"dtype": val.dtype, "device": val.device},
        )
        zero.meta.update(node.meta)
        return zero

    def _bind(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        self.env[node] = copy
        value = self.step.value_of.get(node)
        if value is not None:
            self.of_value.setdefault(value, []).append(node)
        return copy


def _forward(
    step: StepGraph, steps: Sequence[Step], live: _Liveness, at: int
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    emitter = _Emitter(step, live)
    for primal in step.joint.primals:
        emitter.primal(primal)
    _run(emitter, steps, 0)
    saved = tuple(v for v in live.needed[at] if _saved_by_forward(step, v))
    outputs = [emitter.load(n) if isinstance(n, fx.Node) else n for n in step.joint.outputs]
    module = emitter.output((*outputs, *(emitter.value(v) for v in saved)))
    module.meta["called"] = emitter.called
    return module, saved


def _saved_by_forward(step: StepGraph, value: int) -> bool:
    """Whether forward hands the value to backward; tangents and constants come by themselves."""
    owner = step.owners[value]
    return owner is None or (owner.op != "get_attr" and owner not in step.joint.tangents)


def _slices(
    step: StepGraph,
    steps: Sequence[Step],
    live: _Liveness,
    offset: int,
    saved: tuple[int, ...],
) -> Iterator[Slice]:
    tangents = [step.value_of[t] for i, t in enumerate(step.joint.tangents) if i not in step.absent]
    inputs = (*saved, *tangents)
    start = 0
    without = step.without_gradient()
    for end in _slice_ends(steps):
        emitter = _Emitter(step, live)
        for v in inputs:
            emitter.placeholder(v)
        _run(emitter, steps[start:end], offset + start)
        last = end == len(steps)
        primals = _delivered(step, steps[start:end], last)
        gradients = _gradients(step, emitter, primals)
        held = () if last else live.needed[offset + end - 1]
        inputs_next = tuple(v for v in held if v in emitter.states or step.owners[v] in emitter.env)
        module = emitter.output((gradients, [emitter.value(v) for v in inputs_next]))
        module.meta["called"] = emitter.called
        run = {s.op for s in steps[start:end] if isinstance(s, Compute)}
        others = [p for p, maker in without.items() if maker in run or (last and maker is None)]
        yield Slice(module, inputs, primals, tuple(others))
        inputs, start = inputs_next, end


def _gradients(step: StepGraph, emitter: _Emitter, primals: Sequence[int]) -> list[fx.Node]:
    """Loads gradients; two that share a storage would be accumulated into each other."""
    result: list[fx.Node] = []
    seen: set[int | None] = set()
    for primal in primals:
        node = emitter.load(_node(step.joint.gradients[primal]))
        value = step.gradient_values[primal]
        if value in seen:
            node = emitter.graph.call_function(torch.ops.aten.clone.default, (node,))
        seen.add(value)
        result.append(node)
    return result


def _slice_ends(steps: Sequence[Step]) -> list[int]:
    """Positions right after each `Deliver`; the last one takes what follows it, too."""
    ends = [i + 1 for i, s in enumerate(steps) if isinstance(s, Deliver)]
    if not ends:
        return [len(steps)]
    return [*ends[:-1], len(steps)]


def _delivered(step: StepGraph, steps: Sequence[Step], last: bool) -> tuple[int, ...]:
    """Primals whose gradients leave with these steps.

    A gradient that no backward operation makes (it is a tangent, or a saved value) has no step of
    its own and leaves at the end.
    """
    values = {v for s in steps if isinstance(s, Deliver) for v in s.values}
    made = {v.index for v in step.graph.values if v.kind == "gradient"}
    return tuple(
        primal
        for primal, value in enumerate(step.gradient_values)
        if value is not None and (value in values or (last and value not in made))
    )


def _run(emitter: _Emitter, steps: Iterable[Step], offset: int) -> None:
    for number, item in enumerate(steps, offset):
        match item:
            case Compute(index):
                emitter.compute(number, index)
            case Free(value):
                emitter.forget(value)
            case _:
                pass


def _check(step: StepGraph, schedule: Schedule, result: Rewritten) -> None:
    """The graphs call exactly the schedule's operations, in its order."""
    called = list(graph_of(result.forward).meta["called"])
    for part in result.slices:
        called += graph_of(part.function).meta["called"]
    if tuple(called) != schedule.order:
        raise ScheduleError("the rewritten graphs do not run the schedule's operations")
    delivered = sorted(p for part in result.slices for p in part.primals)
    expected = [p for p, v in enumerate(step.gradient_values) if v is not None]
    if delivered != expected:
        raise ScheduleError("the rewritten backward does not return every gradient once")


def _producer(step: StepGraph, value: int) -> int:
    producer = step.graph.values[value].producer
    assert producer is not None
    return producer


def _only(nodes: Sequence[fx.Node]) -> fx.Node:
    (node,) = nodes
    return node


def _node(node: fx.Node | None) -> fx.Node:
    assert node is not None
    return node
