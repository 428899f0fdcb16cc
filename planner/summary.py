"""Turns a solver's answer into a plan: judged by the simulator, described for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from planner.cuts import breakdown, cut_points, recomputed_operations, saved_values, timeline
from planner.plan import Plan
from planner.problem import Problem, Solution
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.errors import PlannerError
from tracer.graph import ComputationGraph

if TYPE_CHECKING:
    from planner.engine import Engine


def summarise(
    problem: Problem,
    solution: Solution,
    *,
    minimum_bytes: int,
    floor: int,
    solver: str,
    seconds: float,
    device: str,
    notes: tuple[str, ...],
    engine: Engine | None,
) -> Plan:
    """The plan for a solution.

    `floor` is the peak of the optimizer's step, which comes after the schedule.
    """
    graph = problem.graph
    schedule = Schedule.from_order(graph, solution.order)
    result = simulate(graph, schedule)
    if result.peak_bytes > problem.budget_bytes:
        raise PlannerError(f"solver {solver} returned a schedule over the budget: a defect")
    plain = Schedule.from_order(graph, save_all_order(graph))
    baseline = simulate(graph, plain)
    base_ns = max(baseline.time_ns, 1)
    bound_ns = max(solution.bound_ns, baseline.time_ns)
    optimal = solution.exact or bound_ns >= result.time_ns
    bound_ns = result.time_ns if optimal else bound_ns
    return Plan(
        budget_bytes=problem.budget_bytes,
        peak_bytes=max(result.peak_bytes, floor),
        baseline_peak_bytes=max(baseline.peak_bytes, floor),
        minimum_peak_bytes=minimum_bytes,
        saved_bytes=_bytes(graph, schedule),
        baseline_saved_bytes=_bytes(graph, plain),
        overhead=(result.time_ns - baseline.time_ns) / base_ns,
        lower_bound=(bound_ns - baseline.time_ns) / base_ns,
        gap=(result.time_ns - bound_ns) / max(bound_ns, 1),
        status="optimal" if optimal else "feasible",
        solver=solver,
        solve_seconds=seconds,
        step_ns=result.time_ns,
        recompute_ns=result.recompute_ns,
        device=device,
        torch_version=torch.__version__,
        fingerprint=graph.fingerprint(costs=False),
        cost_fingerprint=graph.fingerprint(),
        optimizer_peak_bytes=floor,
        accumulate=graph.accumulate,
        order=solution.order,
        cuts=cut_points(graph, schedule),
        recomputed=recomputed_operations(graph, schedule),
        timeline=timeline(graph, schedule, result),
        breakdown=breakdown(graph, schedule, result),
        graph=graph,
        notes=notes,
        keep=engine.request.keep if engine else (),
        recompute=engine.request.recompute if engine else (),
        backend=engine.request.backend if engine else "eager",
        _engine=engine,
    )


def _bytes(graph: ComputationGraph, schedule: Schedule) -> int:
    return sum(graph.values[v].nbytes for v in saved_values(graph, schedule))
