"""DTR's greedy rule as a solver; see `planner.eviction`."""

from __future__ import annotations

from planner.eviction import OutOfMemory, greedy_order
from planner.instance import Instance
from planner.minimum import infeasible
from planner.problem import Problem, Solution


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """DTR's greedy rule with known next uses."""
    del time_limit  # one pass, linear in the runs
    instance = Instance(problem)
    budget = problem.budget_bytes
    states = sum(instance.size[s] for s in instance.state if s >= 0)
    for slack in (0, states):
        try:
            order = greedy_order(instance, budget - slack)
        except OutOfMemory:
            break
        if instance.peak(order) <= budget:
            return Solution(tuple(order))
    raise infeasible(instance, budget)
