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
    """Bytes held while one step of the schedule runs, the fixed part included."""

    what: str
    name: str
    bytes: int


def saved_values(graph: ComputationGraph, schedule: Schedule) -> frozenset[int]:
    """Forward values held at the boundary."""
    before: frozenset[int] = frozenset()
    for (_, held), step in zip(holdings(graph, schedule), schedule.steps, strict=True):
        if isinstance(step, Boundary):
            return frozenset(v for v in before if graph.values[v].kind is not Kind.STATE)
        before = held
    return before


def cut_points(graph: ComputationGraph, schedule: Schedule) -> tuple[CutPoint, ...]:
    """Saved values that recomputed operations read, in the order of the forward pass."""
    again = set(schedule.recomputed)
    if not again:
        return ()
    starts = {v for op in again for v in graph.operations[op].inputs}
    return tuple(
        _cut_point(graph, v, again) for v in sorted(saved_values(graph, schedule) & starts)
    )


def _cut_point(graph: ComputationGraph, v: int, again: set[int]) -> CutPoint:
    value = graph.values[v]
    assert value.producer is not None
    op = graph.operations[value.producer]
    readers = sum(c in again for c in graph.consumers[v])
    if not op.recomputable:
        reason = "cannot be made again"
    elif value.kind is Kind.OUTPUT:
        reason = "held by the caller anyway"
    else:
        rate = op.time_ns / value.nbytes if value.nbytes else 0.0
        reason = f"saves {op.time_ns / 1e6:.3g} ms again, {rate:.2g} ns a byte"
    reason += f"; {readers} recomputed operation{'s' * (readers != 1)} start from it"
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
            entries.append(TimelineEntry(what, op.name, held))
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
