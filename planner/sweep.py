"""One problem at many budgets: every order and bound serves its neighbours.

From the largest budget down, one round of the staged program at each, which starts with the moments
that bound the budget before. Then up again: an order for less memory, with second runs taken out as
far as the larger budget allows, competes with what was found there. An order fits every larger
budget and a bound holds for every smaller one, so overhead and bound never rise with the budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from planner.bounds import lower_bound
from planner.instance import Instance
from planner.linear import ProgramError
from planner.minimum import infeasible, least_peak
from planner.problem import Problem, Solution
from planner.search import improve_order, reduce_order
from planner.solvers import staged
from planner.solvers.chain import chain_order
from planner.staged_program import Moment
from runtime.schedule import save_all_order

TRIES = 20_000  # exchanges tried on each order, times operations
MOST = 40  # moments handed on to the next budget
WIDE = 5e-2  # gap, as a fraction of the step, at which the chain and exchanges are tried


def sweep(problem: Problem, budgets: Sequence[int], *, time_limit: float) -> tuple[Solution, ...]:
    """A solution for each budget; the problem's own budget is not used.

    After `time_limit` seconds no more programs are solved; neighbours' orders still serve.

    Raises:
        InfeasibleBudget: the least of the budgets is below the least peak.
    """
    base = Instance(problem)
    end = time.monotonic() + time_limit
    least, least_order = least_peak(base)
    if budgets and min(budgets) < least:
        raise infeasible(base, min(budgets))
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    bound, moments = problem.graph.time_ns, frozenset[Moment]()
    for budget in sorted(set(budgets), reverse=True):
        order, better, moments = _at(base.at(budget), least_order, moments, end)
        bound = max(bound, better)
        found[budget] = (order, bound)
    return _upwards(base, found, budgets)


def _at(
    instance: Instance, least_order: tuple[int, ...], moments: frozenset[Moment], end: float
) -> tuple[tuple[int, ...], int, frozenset[Moment]]:
    """(order, bound, moments for the next budget) of one budget."""
    nothing = save_all_order(instance.graph)
    if not instance.dropped and instance.peak(nothing) <= instance.budget:
        return nothing, instance.graph.time_ns, moments
    order, bound = least_order, 0
    if time.monotonic() < end:
        result = staged.search(instance, moments, rounds=2, tries=TRIES)
        order = result.order or order
        moments = frozenset(result.binding[:MOST])
        with suppress(ProgramError):
            bound = lower_bound(instance, instance.budget, result.binding)
        order = _second_opinion(instance, order, bound, end)
    return order, bound, moments


def _second_opinion(
    instance: Instance, order: tuple[int, ...], bound: int, end: float
) -> tuple[int, ...]:
    """The order, or a better one where it is far from the bound, as near the least peak."""
    if instance.time_of(order) <= bound + WIDE * instance.graph.time_ns:
        return order
    chained = chain_order(instance, instance.budget, end)
    if chained is not None:
        order = min(order, tuple(chained), key=instance.time_of)
    return tuple(improve_order(instance, order, TRIES, end))


def _upwards(
    base: Instance, found: dict[int, tuple[tuple[int, ...], int]], budgets: Sequence[int]
) -> tuple[Solution, ...]:
    best: tuple[int, ...] = ()
    solutions: dict[int, Solution] = {}
    for budget in sorted(found):
        order, bound = found[budget]
        if best and base.time_of(best) > base.graph.time_ns:
            shorter = tuple(reduce_order(base, best, budget))
            order = min(order, shorter, key=base.time_of)
        best = order
        spent = base.time_of(order)
        solutions[budget] = Solution(order, min(bound, spent), bound >= spent, "sweep")
    return tuple(solutions[budget] for budget in budgets)
