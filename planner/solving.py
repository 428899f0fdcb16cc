"""Asks a solver, after what no solver can change."""

from __future__ import annotations

from planner.instance import Instance
from planner.minimum import infeasible, minimum_peak
from planner.problem import Problem, Solution
from planner.progress import report
from planner.request import Request
from planner.solvers import SOLVERS
from tracer.errors import InfeasibleBudget


def solve(problem: Problem, request: Request, floor: int) -> tuple[Solution, int]:
    """Runs the solver; also returns the least feasible budget.

    `floor` is what the optimizer's step needs, which no schedule can lower.
    """
    least, _ = minimum_peak(problem.graph, problem.keep, problem.recompute)
    minimum = max(least, floor)
    if problem.budget_bytes < minimum:
        if floor > least:
            raise InfeasibleBudget(
                problem.budget_bytes, minimum, (("the optimizer's step", floor),)
            )
        raise infeasible(Instance(problem), problem.budget_bytes)
    report("solving")
    solution = SOLVERS[request.solver](problem, time_limit=request.time_limit)
    return solution, minimum
