"""What a plan says about its values: the cut points, what runs again, and what fills the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from runtime.schedule import Boundary, Compute, Schedule
from runtime.simulator import Simulation, holdings
from tracer.graph import ComputationGraph, Kind


@dataclass(frozen=True)
class CutPoint:
    """A saved value from which recomputation starts.

    Attributes:
        name: the value's name in the graph.
        module, op, source: module path, operator, and "file:line" that make it.
        shape, dtype, bytes: of its storage.
        recompute_ns: time of the operation that makes it, which saving it avoids.
        reason: why it is kept, in words.

    `Plan.cuts` lists first what weighs most: bytes times the time that keeping them avoids. Values
    about which there is no choice (outputs, results that cannot be made again) come last.
    """

    name: str
    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    recompute_ns: int
    reason: str


@dataclass(frozen=True)
class Recomputed:
    """An operation that runs again in the backward pass.

    Attributes:
        times: how often it runs again; time_ns: what all of them take; bytes: of its results.
    """

    name: str
    module: str
    op: str
    source: str
    times: int
    time_ns: int
    bytes: int


@dataclass(frozen=True)
class TimelineEntry:
    """One run of an operation, or the boundary.

    Attributes:
        what: "forward", "backward", "recompute" or "boundary".
        name: of the operation.
        bytes: held while it runs, its workspace and the fixed part included.
        time_ns: how long it runs.
    """

    what: str
    name: str
    bytes: int
    time_ns: int = 0


def saved_values(graph: ComputationGraph, schedule: Schedule) -> frozenset[int]:
    """Forward values held at the boundary."""
    before: frozenset[int] = frozenset()
    for (_, held), step in zip(holdings(graph, schedule), schedule.steps, strict=True):
        if isinstance(step, Boundary):
            return frozenset(v for v in before if graph.values[v].kind is not Kind.STATE)
        before = held
    return before


def cut_points(graph: ComputationGraph, schedule: Schedule) -> tuple[CutPoint, ...]:
    """Saved values that recomputed operations read, the weightiest first."""
    again = set(schedule.recomputed)
    if not again:
        return ()
    starts = {v for op in again for v in graph.operations[op].inputs}
    found = sorted(saved_values(graph, schedule) & starts, key=lambda v: _weight(graph, v))
    return tuple(_cut_point(graph, v, again) for v in found)


def _weight(graph: ComputationGraph, v: int) -> tuple[bool, int, int, int]:
    """Sorting key: choices before the rest, then bytes x time saved, then bytes, falling."""
    value = graph.values[v]
    op = graph.operations[_producer(graph, v)]
    forced = not op.recomputable or value.kind is Kind.OUTPUT
    return forced, -value.nbytes * op.time_ns, -value.nbytes, v


def _producer(graph: ComputationGraph, v: int) -> int:
    producer = graph.values[v].producer
    assert producer is not None  # saved values are made by forward operations
    return producer


def _cut_point(graph: ComputationGraph, v: int, again: set[int]) -> CutPoint:
    value = graph.values[v]
    op = graph.operations[_producer(graph, v)]
    readers = sum(c in again for c in graph.consumers[v])
    if not op.recomputable:
        reason = "kept: its operation must not run twice"
    elif value.kind is Kind.OUTPUT:
        reason = "held in any case: it is an output of the model"
    else:
        reason = f"keeping it avoids {_milliseconds(op.time_ns)} of recomputation"
    reason += f"; {readers} recomputed operation{' reads' if readers == 1 else 's read'} it"
    return CutPoint(
        value.name,
        op.module,
        op.target,
        op.source,
        value.shape,
        value.dtype,
        value.nbytes,
        op.time_ns,
        reason,
    )


def _milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:.3g} ms"


def recomputed_operations(graph: ComputationGraph, schedule: Schedule) -> tuple[Recomputed, ...]:
    """Operations that run more than once, in the order of the forward pass."""
    times = Counter(schedule.recomputed)
    return tuple(
        Recomputed(
            op.name,
            op.module,
            op.target,
            op.source,
            times[op.index],
            times[op.index] * op.time_ns,
            sum(graph.values[v].nbytes for v in op.outputs),
        )
        for op in (graph.operations[i] for i in sorted(times))
    )


def timeline(
    graph: ComputationGraph, schedule: Schedule, simulation: Simulation
) -> tuple[TimelineEntry, ...]:
    """One entry for each run of an operation."""
    seen: set[int] = set()
    entries = []
    for step, held in zip(schedule.steps, simulation.held_bytes, strict=True):
        if isinstance(step, Compute):
            op = graph.operations[step.op]
            what = "recompute" if step.op in seen else str(op.phase)
            seen.add(step.op)
            entries.append(TimelineEntry(what, op.name, held, op.time_ns))
        elif isinstance(step, Boundary):
            entries.append(TimelineEntry("boundary", "", held))
    return tuple(entries)


def breakdown(
    graph: ComputationGraph, schedule: Schedule, simulation: Simulation
) -> tuple[tuple[str, int], ...]:
    """What fills the peak: the fixed part by owner, then values by kind, then workspace."""
    parts: dict[str, int] = dict(graph.fixed_bytes)
    at = _held_at(graph, schedule, simulation.peak_step)
    names = {
        Kind.ACTIVATION: "forward values",
        Kind.OUTPUT: "outputs",
        Kind.TANGENT: "tangents",
        Kind.TEMPORARY: "backward temporaries",
        Kind.GRADIENT: "new gradients",
        Kind.STATE: "random-number states",
    }
    for kind, name in names.items():
        size = sum(graph.values[v].nbytes for v in at if graph.values[v].kind is kind)
        if size:
            parts[name] = size
    rest = simulation.peak_bytes - sum(parts.values())
    if rest:
        parts["workspace"] = rest
    return tuple(parts.items())


def _held_at(graph: ComputationGraph, schedule: Schedule, number: int) -> frozenset[int]:
    """What is held right after a step."""
    return next(held for at, held in holdings(graph, schedule) if at == number)
