"""A plan made again with other wishes, from the graph that it carries."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.request import Request, budget_bytes, patterns, problems_of
from planner.solving import solve
from tracer.errors import InvalidBudget, PlannerError

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.plan import Plan


def edit(
    plan: Plan,
    keep: str | Sequence[str] | None,
    recompute: str | Sequence[str] | None,
    budget_gb: float | None,
    time_limit: float,
) -> Plan:
    """See `Plan.edit`."""
    from planner.summary import summarise

    if plan.pieces:
        raise PlannerError(
            "this plan is for a forward that is captured in pieces: make a new one with "
            "planner.plan(..., keep=..., recompute=...)"
        )
    keep = plan.keep if keep is None else patterns(keep)
    recompute = plan.recompute if recompute is None else patterns(recompute)
    graph = plan.graph
    budget = plan.budget_bytes if budget_gb is None else _bytes(budget_gb)
    (problem,) = problems_of([graph], budget, keep, recompute)
    request = Request(problem.budget_bytes, time_limit=time_limit)
    start = time.perf_counter()
    solution, minimum = solve(problem, request, plan.optimizer_peak_bytes)
    made = summarise(
        problem,
        solution,
        minimum_bytes=minimum,
        floor=plan.optimizer_peak_bytes,
        solver=solution.winner or request.solver,
        seconds=time.perf_counter() - start,
        device=plan.device,
        notes=plan.notes,
        engine=plan._engine,
    )
    made = dataclasses.replace(
        made, keep=keep, recompute=recompute, torch_version=plan.torch_version
    )
    if plan._engine is not None:
        _remember(plan._engine, plan, made)
    return made


def _remember(engine: Engine, old: Plan, new: Plan) -> None:
    """The new plan can be applied where the old one could."""
    made = [
        (key, engine.program_of(program.step, new.order, new.budget_bytes))
        for key, program in engine.programs_of(old)
    ]
    if made:
        engine.remember(new, made)


def _bytes(budget_gb: float) -> int:
    budget = budget_bytes(budget_gb)
    if budget is None:
        raise InvalidBudget("budget_gb='auto' needs the device: pass gigabytes to edit a plan")
    return budget
