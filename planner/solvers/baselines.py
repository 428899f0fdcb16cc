"""Baselines that people know, for comparison: nothing recomputed."""

from __future__ import annotations

from planner.instance import Instance
from planner.minimum import infeasible
from planner.problem import Problem, Solution
from runtime.schedule import save_all_order


def save_all(problem: Problem, *, time_limit: float) -> Solution:
    """Recomputes nothing: optimal if it fits."""
    del time_limit
    instance = Instance(problem)
    order = save_all_order(problem.graph)
    if instance.dropped or instance.peak(order) > problem.budget_bytes:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(order, problem.graph.time_ns, exact=True)
