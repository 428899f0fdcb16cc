"""The least peak that our schedules reach, and what fills it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.eviction import OutOfMemory, greedy_order
from planner.instance import Instance
from planner.problem import Problem
from runtime.schedule import Compute, Schedule, save_all_order
from runtime.simulator import holdings, simulate
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph


def minimum_peak(
    graph: ComputationGraph, keep: Iterable[int] = (), recompute: Iterable[int] = ()
) -> tuple[int, tuple[int, ...]]:
    """(least peak in bytes, an order that reaches it)."""
    instance = Instance(Problem(graph, 0, frozenset(keep), frozenset(recompute)))
    return least_peak(instance)


def least_peak(instance: Instance) -> tuple[int, tuple[int, ...]]:
    """Bisects for the least budget at which the greedy rule succeeds."""
    best: tuple[int, ...] = save_all_order(instance.graph)
    peak = instance.peak(best)
    if instance.dropped:
        best = tuple(greedy_order(instance, peak))
        peak = instance.peak(best)
    low, high = unavoidable_peak(instance), peak
    while low < high:
        middle = (low + high) // 2
        try:
            order = greedy_order(instance, middle)
        except OutOfMemory:
            low = middle + 1 if middle + 1 > low else high
            continue
        found = instance.peak(order)
        if found < peak:
            best, peak = tuple(order), found
        high = min(middle, high)
        if found > middle:  # random-number states, which greedy does not count
            break
        high = found
    return peak, best


def unavoidable_peak(instance: Instance) -> int:
    """Bytes that some operation needs in any schedule: what it reads, makes and works with."""
    most = instance.fixed
    for o in range(instance.count):
        touched = {*instance.reads[o], *instance.makes[o]}
        need = sum(instance.size[v] for v in touched) + instance.workspace[o]
        most = max(most, instance.fixed + need)
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
        rows.append((f"workspace of {op.name} ({op.target}) in {op.module or 'model'}",
                     op.workspace))
    for v in held:
        value = graph.values[v]
        module = "" if value.producer is None else graph.operations[value.producer].module
        rows.append((f"{value.kind} {value.name} in {module or 'model'}", value.nbytes))
    rows = [row for row in rows if row[1] > 0]
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0]))[:most])
