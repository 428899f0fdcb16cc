"""The least peak that our schedules reach, and what fills it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from planner.eviction import OutOfMemory, greedy_order
from planner.instance import Instance
from planner.oracle import TINY, TooLarge, least_peak_order
from planner.orders import lazy_order
from planner.problem import Problem
from planner.staged_program import base_memory
from runtime.schedule import Compute, Schedule, save_all_order
from runtime.simulator import holdings, simulate
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph

REFINEMENTS = 8  # bisections after the first success


def minimum_peak(
    graph: ComputationGraph, keep: Iterable[int] = (), recompute: Iterable[int] = ()
) -> tuple[int, tuple[int, ...]]:
    """(least peak in bytes, an order that reaches it)."""
    instance = Instance(Problem(graph, 0, frozenset(keep), frozenset(recompute)))
    return least_peak(instance)


def least_peak(instance: Instance) -> tuple[int, tuple[int, ...]]:
    """Climbs from what no schedule can avoid to where greedy eviction succeeds, then bisects.

    Often the first try succeeds, and the peak is then the least of all schedules. For tiny graphs
    it always is.
    """
    best = _unbounded(instance)
    peak = instance.peak(best)
    low = unavoidable_peak(instance)
    step = max(1, (peak - low) // 1024)
    high = low
    while high < peak:
        fitting = _within(instance, high)
        if fitting is not None:
            best, peak = fitting, instance.peak(fitting)
            break
        low, high, step = high + 1, high + step, 2 * step
    for _ in range(REFINEMENTS):
        if low >= peak:
            break
        middle = (low + peak) // 2
        fitting = _within(instance, middle)
        if fitting is None:
            low = middle + 1
        else:
            best, peak = fitting, instance.peak(fitting)
    if instance.count <= TINY:
        with suppress(TooLarge):
            best = least_peak_order(instance, unavoidable_peak(instance), best)
    return instance.peak(best), best


def _unbounded(instance: Instance) -> tuple[int, ...]:
    """An order without a budget: recomputes what must not be held at the boundary, no more."""
    order = save_all_order(instance.graph)
    return tuple(lazy_order(instance, _keepable(instance))) if instance.dropped else order


def _keepable(instance: Instance) -> list[int]:
    made = range(len(instance.size))
    return [v for v in made if instance.is_choice(v) and v not in instance.dropped]


def _within(instance: Instance, budget: int) -> tuple[int, ...] | None:
    """An order with a peak of at most `budget`, if greedy eviction finds one."""
    for fresh in (8, 32):
        try:
            order = greedy_order(instance, budget, fresh)
        except OutOfMemory:
            continue
        if instance.peak(order) <= budget:
            return tuple(order)
    return None


def unavoidable_peak(instance: Instance) -> int:
    """Bytes that any schedule needs at some operation.

    At the first run of an operation it holds what the operation touches, and of all else what it
    has no choice about: outputs, tangents, gradients and temporaries of backward.
    """
    base, _ = base_memory(instance)
    most = instance.fixed
    for o, held in enumerate(base):
        touched = {*instance.reads[o], *instance.makes[o]}
        choice = sum(instance.size[v] for v in touched if instance.is_choice(v))
        most = max(most, held + choice)
    return most


def infeasible(instance: Instance, budget: int) -> InfeasibleBudget:
    """The error for a budget below the minimum."""
    peak, order = least_peak(instance)
    return InfeasibleBudget(budget, peak, limiting(instance.graph, order))


def limiting(
    graph: ComputationGraph, order: Sequence[int], most: int = 8
) -> tuple[tuple[str, int], ...]:
    """What an order holds at its peak: pairs of (description, bytes), largest first."""
    schedule = Schedule.from_order(graph, order)
    step = simulate(graph, schedule).peak_step
    held = next(values for number, values in holdings(graph, schedule) if number == step)
    rows = [(f"fixed: {who}", nbytes) for who, nbytes in graph.fixed_bytes]
    at = schedule.steps[step]
    if isinstance(at, Compute):
        op = graph.operations[at.op]
        rows.append(
            (f"workspace of {op.name} ({op.target}) in {op.module or 'model'}", op.workspace)
        )
    for v in held:
        value = graph.values[v]
        module = "" if value.producer is None else graph.operations[value.producer].module
        rows.append((f"{value.kind} {value.name} in {module or 'model'}", value.nbytes))
    rows = [row for row in rows if row[1] > 0]
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0]))[:most])
