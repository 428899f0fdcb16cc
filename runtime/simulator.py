"""The judge: what a schedule costs. No solver reports its own peak; this file does.

Memory model, step by step. `Compute` allocates every output anew (also one that is still held: the
second copy is dropped right away) and the workspace; after it the workspace is gone. `Free`
returns the value's bytes. `Boundary` brings the tangents. `Deliver` frees the gradients it hands
over if gradients accumulate, and leaves them with their parameters if not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.schedule import Boundary, Compute, Deliver, Free, Schedule, writes
from tracer.graph import ComputationGraph, Kind


@dataclass(frozen=True)
class Simulation:
    """Price of a schedule.

    Attributes:
        peak_bytes: the most bytes held at one time, the fixed part included.
        peak_step: index of the step at which that happens.
        boundary_bytes: forward values held at the boundary (saved bytes).
        time_ns: sum over all calls; `recompute_ns`: the part spent running operations again.
        held_bytes: bytes held while each step runs, the fixed part included (`Compute`: with
            workspace), one entry for each step.
    """

    peak_bytes: int
    peak_step: int
    boundary_bytes: int
    time_ns: int
    recompute_ns: int
    held_bytes: tuple[int, ...]


def simulate(graph: ComputationGraph, schedule: Schedule) -> Simulation:
    """Prices a schedule that `runtime.schedule.check` accepts."""
    size = [v.nbytes for v in graph.values]
    alive: set[int] = set()
    runs: set[int] = set()
    current = graph.fixed
    boundary_bytes = time_ns = recompute_ns = 0
    trace: list[int] = []
    for step in schedule.steps:
        now = current
        match step:
            case Compute(index):
                op = graph.operations[index]
                made = writes(op, again=index in runs)
                now = current + sum(size[v] for v in made) + op.workspace
                current += sum(size[v] for v in made if v not in alive)
                alive.update(made)
                time_ns += op.time_ns
                recompute_ns += op.time_ns if index in runs else 0
                runs.add(index)
            case Free(value):
                if value in alive:
                    alive.discard(value)
                    current -= size[value]
            case Boundary():
                boundary_bytes = sum(size[v] for v in alive)
                tangents = [v.index for v in graph.values if v.kind is Kind.TANGENT]
                alive.update(tangents)
                now = current = current + sum(size[v] for v in tangents)
            case Deliver(values) if graph.accumulate:
                alive.difference_update(values)
                current -= sum(size[v] for v in values)
            case Deliver():
                pass
        trace.append(now)
    peak = max(trace, default=current)
    return Simulation(
        peak, trace.index(peak) if trace else 0, boundary_bytes, time_ns, recompute_ns, tuple(trace)
    )


def holdings(graph: ComputationGraph, schedule: Schedule) -> Iterator[tuple[int, frozenset[int]]]:
    """For each step the values that the step holds (after it, for `Compute`); resident left out."""
    alive: set[int] = set()
    runs: set[int] = set()
    for number, step in enumerate(schedule.steps):
        match step:
            case Compute(index):
                alive.update(writes(graph.operations[index], again=index in runs))
                runs.add(index)
            case Free(value):
                alive.discard(value)
            case Boundary():
                alive.update(v.index for v in graph.values if v.kind is Kind.TANGENT)
            case Deliver(values):
                if graph.accumulate:
                    alive.difference_update(values)
        yield number, frozenset(alive)
