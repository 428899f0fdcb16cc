"""The least peak that our schedules reach, and what fills it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from planner.eviction import OutOfMemory, greedy_order
from planner.instance import Instance
from planner.oracle import TINY, TooLarge, least_peak_order
from planner.orders import lazy_order
from planner.problem import Problem
from planner.search import repair_order
from planner.staged_program import base_memory
from runtime.schedule import Compute, Schedule, save_all_order
from runtime.simulator import holdings, simulate
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph

REFINEMENTS = 8  # bisections after the first success
EVICTIONS = 100  # in one attempt to lower the peak of an order
RUNS = 300_000  # of operations, in all passes of greedy eviction

Answer = tuple[int, tuple[int, ...]]
_KNOWN: WeakKeyDictionary[ComputationGraph, dict[object, Answer]] = WeakKeyDictionary()


def minimum_peak(
    graph: ComputationGraph, keep: Iterable[int] = (), recompute: Iterable[int] = ()
) -> Answer:
    """(least peak in bytes, an order that reaches it)."""
    instance = Instance(Problem(graph, 0, frozenset(keep), frozenset(recompute)))
    return least_peak(instance)


def least_peak(instance: Instance) -> Answer:
    """Climbs from what no schedule can avoid to where greedy eviction succeeds, then bisects.

    Often the first try succeeds, and the peak is then the least of all schedules. For tiny graphs
    it always is. The answer is kept as long as the graph.
    """
    answers = _KNOWN.setdefault(instance.graph, {})
    key = (tuple(instance.again), instance.dropped)
    if key not in answers:
        answers[key] = _least_peak(instance)
    return answers[key]


def _least_peak(instance: Instance) -> Answer:
    best = _unbounded(instance)
    peak = instance.peak(best)
    low = high = unavoidable_peak(instance)
    step = max(1, (peak - low) // 1024)
    climbing, tries, runs = True, REFINEMENTS, RUNS
    while low < peak and tries and runs > 0:
        fitting, used = _within(instance, high)
        runs -= used
        if fitting is None:
            low = high + 1
        else:
            best, peak, climbing = fitting, instance.peak(fitting), False
        if climbing:
            high, step = min(high + step, peak - 1), 2 * step
        else:
            high, tries = (low + peak) // 2, tries - 1
    best = _lowered(instance, best)
    if instance.count <= TINY:
        with suppress(TooLarge):
            best = least_peak_order(instance, unavoidable_peak(instance), best)
    return instance.peak(best), best


def _lowered(instance: Instance, best: tuple[int, ...]) -> tuple[int, ...]:
    """The order with more evictions at its peak, as long as that lowers it.

    The greedy pass sees a value's next use and not the peaks before it.
    """
    low = unavoidable_peak(instance)
    for _ in range(REFINEMENTS):
        peak = instance.peak(best)
        if low >= peak:
            break
        order = repair_order(instance, best, (low + peak) // 2, EVICTIONS)
        if order is None:
            order = repair_order(instance, best, peak - 1, EVICTIONS)
            if order is None:
                break
            low = (low + peak) // 2 + 1
        best = tuple(order)
    return best


def _unbounded(instance: Instance) -> tuple[int, ...]:
    """An order without a budget: recomputes what must not be held at the boundary, no more."""
    order = save_all_order(instance.graph)
    return tuple(lazy_order(instance, _keepable(instance))) if instance.dropped else order


def _keepable(instance: Instance) -> list[int]:
    made = range(len(instance.size))
    return [v for v in made if instance.is_choice(v) and v not in instance.dropped]


def _within(instance: Instance, budget: int) -> tuple[tuple[int, ...] | None, int]:
    """(an order within `budget`, if greedy eviction finds one, and the runs that it took)."""
    runs = 0
    for fresh in (8, 32):
        try:
            order = greedy_order(instance, budget, fresh)
        except OutOfMemory as error:
            runs += error.runs
            continue
        runs += len(order)
        if instance.peak(order) <= budget:
            return tuple(order), runs
    return None, runs


def unavoidable_peak(instance: Instance) -> int:
    """Bytes that any schedule needs at some operation.

    At the first run of an operation it holds what the operation touches, and of all else what it
    has no choice about: outputs, tangents, gradients and temporaries of backward.
    """
    base, between = base_memory(instance)
    most = instance.fixed
    if instance.boundary == instance.count:  # the tangents arrive after the last operation
        most = between[-1]
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
