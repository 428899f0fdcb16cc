"""The solver that people get: tries the others and keeps the best, with the best bound."""

from __future__ import annotations

from collections.abc import Iterator

from planner.bounds import safe_floor, solve_boundary
from planner.instance import Instance
from planner.linear import Limits, ProgramError
from planner.minimum import infeasible, least_peak
from planner.problem import Problem, Solution
from planner.solvers import chain, greedy, staged
from planner.staged_program import staged_program
from runtime.schedule import save_all_order
from tracer.errors import InfeasibleBudget

_CLOSE = 2e-3  # gap, as a fraction of the step, that needs no second opinion
_BOUND_MOMENTS = 8
_BOUND_COLUMNS = 150_000  # larger programs take too long for what they add to the bound


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """Nothing to do if all fits; else the staged program, and where that leaves a gap the chain.

    The work is bounded by counts, not by the clock, so that every process finds the same plan.
    """
    instance = Instance(problem)
    nothing = save_all_order(problem.graph)
    if not instance.dropped and instance.peak(nothing) <= problem.budget_bytes:
        return Solution(nothing, problem.graph.time_ns, exact=True, winner="save_all")
    found = staged.search(instance)
    bound = _bound(instance, found)
    best: Solution | None = None
    if found.order:
        best = Solution(found.order, winner="staged")
    if best is None or instance.time_of(best.order) - bound > _CLOSE * problem.graph.time_ns:
        for other in _others(problem, time_limit, tight=best is None):
            if best is None or instance.time_of(other.order) < instance.time_of(best.order):
                best = other
    if best is None:
        raise infeasible(instance, problem.budget_bytes)
    time = instance.time_of(best.order)
    return Solution(best.order, min(bound, time), bound >= time, best.winner)


def _others(problem: Problem, time_limit: float, *, tight: bool) -> Iterator[Solution]:
    for name, solver in (("chain", chain.solve), ("greedy", greedy.solve)):
        try:
            found = solver(problem, time_limit=time_limit)
        except InfeasibleBudget:
            continue
        yield Solution(found.order, winner=name)
    if tight:
        peak, order = least_peak(Instance(problem))
        if peak <= problem.budget_bytes:
            yield Solution(order, winner="least peak")


def _bound(instance: Instance, found: staged.Found) -> int:
    """The better of the boundary program's bound and that of the staged program, relaxed."""
    base = instance.graph.time_ns
    bounds = [base]
    try:
        bounds.append(
            solve_boundary(instance, instance.budget, Limits(1e-4, nodes=1000)).bound_ns
        )
        moments = sorted(found.binding[:_BOUND_MOMENTS])
        program = staged_program(instance, instance.budget, moments, None).program
        if len(program.cost) <= _BOUND_COLUMNS:
            bounds.append(base + safe_floor(program.solve(relaxed=True)))
    except ProgramError as error:
        if error.infeasible:
            raise infeasible(instance, instance.budget) from error
    return max(bounds)
