"""Looks at every schedule there is; see `planner.oracle`."""

from __future__ import annotations

from planner.instance import Instance
from planner.minimum import infeasible
from planner.oracle import optimal_order
from planner.problem import Problem, Solution


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """The optimum among all schedules that keep the order of first runs, for tiny graphs.

    Raises:
        InfeasibleBudget: no schedule fits at all.
        TooLarge: there are too many states.
    """
    del time_limit
    instance = Instance(problem)
    order = optimal_order(instance)
    if order is None:
        raise infeasible(instance, problem.budget_bytes)
    time = instance.time_of(order)
    return Solution(order, time, exact=True, winner="exhaustive")
