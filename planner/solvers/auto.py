"""The solver that people get: tries the others and keeps the best."""

from __future__ import annotations

from planner.bounds import solve_boundary
from planner.instance import Instance
from planner.minimum import infeasible, least_peak
from planner.orders import lazy_order
from planner.problem import Problem, Solution
from planner.search import reduce_order
from planner.eviction import OutOfMemory, greedy_order
from planner.linear import Limits, ProgramError
from runtime.schedule import save_all_order


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """Best of: nothing to do; boundary program under a tightened budget; greedy; least peak."""
    instance = Instance(problem)
    budget = problem.budget_bytes
    nothing = save_all_order(problem.graph)
    if not instance.dropped and instance.peak(nothing) <= budget:
        return Solution(nothing, problem.graph.time_ns, exact=True)
    try:
        bound = solve_boundary(instance, budget, Limits(1e-4, nodes=1000)).bound_ns
    except ProgramError as error:
        if error.infeasible:
            raise infeasible(instance, budget) from error
        bound = problem.graph.time_ns
    found = [*_tightened(instance, budget), *_greedy(instance, budget)]
    if not found:
        peak, order = least_peak(instance)
        if peak > budget:
            raise infeasible(instance, budget)
        found = [list(order)]
    reduced = [reduce_order(instance, order, budget) for order in found]
    best = min(reduced, key=instance.time_of)
    return Solution(tuple(best), min(bound, instance.time_of(best)))


def _tightened(instance: Instance, budget: int) -> list[list[int]]:
    """Bisects the boundary program's budget for the largest whose lazy order fits."""
    low, high = 0, budget - instance.fixed
    found: list[list[int]] = []
    for _ in range(14):
        middle = (low + high) // 2
        try:
            answer = solve_boundary(instance, instance.fixed + middle, Limits(1e-3, nodes=200))
        except ProgramError:
            low = middle
            continue
        order = lazy_order(instance, answer.saved)
        if instance.peak(order) <= budget:
            found.append(order)
            low = middle
        else:
            high = middle
    return found


def _greedy(instance: Instance, budget: int) -> list[list[int]]:
    try:
        order = greedy_order(instance, budget)
    except OutOfMemory:
        return []
    return [order] if instance.peak(order) <= budget else []
