"""The computation graph that everything else reasons about: operations, values, and their costs.

A *value* is one storage; views and aliases of it are the same value and cost nothing. An
*operation* is one call of an aten operator. One graph holds the forward and the backward operations
of one training step (the joint graph), in an order in which they can be run.

Nothing here knows torch: graphs can be built by hand, at random, or from a file, which is how the
solvers are tested.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx


class Phase(enum.StrEnum):
    """When an operation first runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(enum.StrEnum):
    """What a value is, which decides how long it lives if nobody recomputes it."""

    RESIDENT = "resident"  # parameter, buffer or input: held by others, in `fixed_bytes`
    TANGENT = "tangent"  # gradient of an output: arrives at the boundary, until its last use
    ACTIVATION = "activation"  # made by a forward operation, until its last use
    OUTPUT = "output"  # made by a forward operation and held by the caller to the end
    TEMPORARY = "temporary"  # made by a backward operation, until its last use
    GRADIENT = "gradient"  # made by a backward operation and handed over when its slice ends
    STATE = "state"  # random-number state, kept only if its operation is recomputed


@dataclass(frozen=True, slots=True)
class Value:
    """One storage.

    Attributes:
        index: position in `ComputationGraph.values`.
        name: name of the node that makes it.
        nbytes: bytes that the allocator hands out for it.
        kind: see `Kind`.
        producer: index of the operation that makes it; None if it comes from outside.
        shape, dtype: of the tensor that owns the storage; for people, not for solvers.
        of: for a gradient, the resident values whose gradient it is. It leaves when the last of
            them has been read: whoever takes it may change them (an optimizer in a hook).
    """

    index: int
    name: str
    nbytes: int
    kind: Kind
    producer: int | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator.

    Attributes:
        index: position in `ComputationGraph.operations`, an order in which they can be run.
        inputs, outputs: indices of values, each at most once.
        time_ns: time of one call.
        workspace: most bytes allocated while it runs beyond its inputs and outputs.
        recomputable: whether it may run a second time (forward operations only).
        state: index of the value of kind STATE that replays its random numbers: written by its
            first call, read by each later one; None if it draws none.
        module: dotted path of the module that called it; `source`: "file:line" of the call.
    """

    index: int
    name: str
    target: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time_ns: int
    workspace: int = 0
    recomputable: bool = True
    state: int | None = None
    module: str = ""
    source: str = ""

    @property
    def is_forward(self) -> bool:
        return self.phase is Phase.FORWARD


class GraphError(ValueError):
    """The operations and values do not make a valid graph."""


@dataclass(frozen=True, eq=False)
class ComputationGraph:
    """Operations and values of one training step, checked on construction.

    Forward operations come first, then backward ones. `fixed_bytes` names what is held during the
    whole step and by whom (parameters, buffers, inputs, gradients already allocated, optimizer
    state). With `accumulate` gradients exist before the step, so a new one is added to the old and
    freed when its slice ends; without, it becomes the gradient and stays. `few_slices` says that
    gradients leave the backward pass in a few lots, each an eighth of all bytes or more.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    fixed_bytes: tuple[tuple[str, int], ...] = ()
    accumulate: bool = False
    few_slices: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def boundary(self) -> int:
        """Number of forward operations: the boundary lies right after them."""
        return sum(op.is_forward for op in self.operations)

    @cached_property
    def fixed(self) -> int:
        """Bytes held during the whole step."""
        return sum(nbytes for _, nbytes in self.fixed_bytes)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the operations that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for op in self.operations:
            for v in op.inputs:
                readers[v].append(op.index)
        return tuple(map(tuple, readers))

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """For each operation the gradients that must not have left before it has run.

        Those that it makes or reads, and those of the resident values that it reads.
        """
        gradients = {v.index for v in self.values if v.kind is Kind.GRADIENT}
        of: dict[int, list[int]] = {}
        for g in gradients:
            for v in self.values[g].of:
                of.setdefault(v, []).append(g)
        return tuple(
            tuple(
                {v for v in (*op.inputs, *op.outputs) if v in gradients}.union(
                    *(of.get(v, ()) for v in op.inputs)
                )
            )
            for op in self.operations
        )

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all values of one kind."""
        return sum(v.nbytes for v in self.values if v.kind is kind)

    @cached_property
    def time_ns(self) -> int:
        """Time of the step that recomputes nothing."""
        return sum(op.time_ns for op in self.operations)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Forward values that backward operations read: what may be saved or recomputed."""
        b = self.boundary
        return tuple(
            v.index
            for v in self.values
            if v.producer is not None
            and v.producer < b
            and any(c >= b for c in self.consumers[v.index])
        )

    @cached_property
    def dag(self) -> nx.DiGraph[int]:
        """Frozen networkx DAG: a node per operation (`op`), an edge per dependence (`values`)."""
        g: nx.DiGraph[int] = nx.DiGraph()
        for op in self.operations:
            g.add_node(op.index, op=op)
        for v in self.values:
            if v.producer is None:
                continue
            for c in self.consumers[v.index]:
                if g.has_edge(v.producer, c):
                    g[v.producer][c]["values"] += (v.index,)
                else:
                    g.add_edge(v.producer, c, values=(v.index,))
        nx.freeze(g)
        return g

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {
            "operations": [dataclasses.asdict(op) for op in self.operations],
            "values": [dataclasses.asdict(v) for v in self.values],
            "fixed_bytes": [list(pair) for pair in self.fixed_bytes],
            "accumulate": self.accumulate,
            **({"few_slices": True} if self.few_slices else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComputationGraph:
        """The inverse of `to_dict`, also after a round trip through JSON."""
        operations = tuple(
            Operation(
                **{
                    **op,
                    "phase": Phase(op["phase"]),
                    "inputs": tuple(op["inputs"]),
                    "outputs": tuple(op["outputs"]),
                }
            )
            for op in data["operations"]
        )
        values = tuple(
            Value(
                **{
                    **v,
                    "kind": Kind(v["kind"]),
                    "shape": tuple(v["shape"]),
                    "of": tuple(v.get("of", ())),
                }
            )
            for v in data["values"]
        )
        fixed = tuple((str(who), int(nbytes)) for who, nbytes in data["fixed_bytes"])
        few = bool(data.get("few_slices", False))
        return cls(operations, values, fixed, bool(data["accumulate"]), few)

    def fingerprint(self, *, costs: bool = True) -> str:
        """Hash of operators, dependences and shapes; with `costs` also of bytes and times."""
        rows: list[object] = []
        for op in self.operations:
            row = [op.target, op.phase, op.inputs, op.outputs, op.recomputable, op.state]
            rows.append(row + ([op.time_ns, op.workspace] if costs else []))
        for v in self.values:
            rows.append([v.kind, v.producer, v.shape, v.dtype, *([v.nbytes] if costs else [])])
        if costs:
            rows.append([self.fixed_bytes, self.accumulate])
        if self.few_slices:
            rows.append("few slices")
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def _check(graph: ComputationGraph) -> None:
    made: dict[int, int] = {}
    seen_backward = False
    for position, op in enumerate(graph.operations):
        _check_operation(graph, op, position)
        if op.is_forward and seen_backward:
            raise GraphError(f"forward operation {op.name} stands after a backward one")
        seen_backward |= not op.is_forward
        for v in _all_outputs(op):
            if v in made:
                raise GraphError(f"value {graph.values[v].name} is made twice")
            made[v] = op.index
    for position, value in enumerate(graph.values):
        if value.index != position or value.producer != made.get(position):
            raise GraphError(f"value {value.name}: index or producer is wrong")
        if value.nbytes < 0:
            raise GraphError(f"value {value.name} has a negative size")


def _check_operation(graph: ComputationGraph, op: Operation, position: int) -> None:
    if op.index != position:
        raise GraphError(f"operation {op.name} has index {op.index} at position {position}")
    if op.time_ns < 0 or op.workspace < 0:
        raise GraphError(f"operation {op.name} has a negative cost")
    if op.recomputable and not op.is_forward:
        raise GraphError(f"backward operation {op.name} is marked recomputable")
    for v in op.inputs:
        producer = graph.values[v].producer
        if producer is not None and producer >= position:
            raise GraphError(f"{op.name} reads {graph.values[v].name} before it is made")


def _all_outputs(op: Operation) -> Iterable[int]:
    yield from op.outputs
    if op.state is not None:
        yield op.state
