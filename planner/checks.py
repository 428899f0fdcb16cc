"""Whether a plan holds: its figures derived again, and its schedule on a model at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from planner.family import canonical
from planner.parts import parts
from runtime.schedule import Schedule, ScheduleError
from runtime.simulator import simulate
from tracer.errors import StalePlan
from tracer.graph import ComputationGraph

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.problem import Problem

# Everything that follows from the graph and the order.
DERIVED = (
    *("peak_bytes", "baseline_peak_bytes", "saved_bytes", "baseline_saved_bytes"),
    *("step_ns", "recompute_ns", "overhead", "gap", "status", "fingerprint", "cost_fingerprint"),
    *("accumulate", "cuts", "recomputed", "timeline", "breakdown"),
)


def differences(plan: Plan) -> list[str]:
    """What does not follow from the plan's graph and schedule, in words; empty if all does.

    The lower bound is a proof that is not made again here: it is only compared with the overhead.
    """
    wrong = []
    for number, part in enumerate(parts(plan)):
        where = f"piece {number}: " if plan.pieces else ""
        wrong += [where + words for words in _of_part(part)]
    if plan.peak_bytes > plan.budget_bytes:
        wrong.append(f"the peak of {plan.peak_bytes} bytes is over the budget")
    return wrong


def _of_part(part: Plan) -> list[str]:
    from planner.problem import Problem, Solution
    from planner.summary import summarise

    graph = part.graph
    bound = graph.time_ns + round(part.lower_bound * graph.time_ns)
    try:
        again = summarise(
            Problem(graph, max(part.budget_bytes, 0)),
            Solution(part.order, bound, part.status == "optimal"),
            minimum_bytes=part.minimum_peak_bytes,
            floor=part.optimizer_peak_bytes,
            solver=part.solver,
            seconds=part.solve_seconds,
            device=part.device,
            notes=part.notes,
            engine=None,
        )
    except Exception as error:  # a schedule over its budget, or worse
        return [f"its schedule cannot be priced: {error}"]
    wrong = []
    for name in DERIVED:
        said, found = getattr(part, name), getattr(again, name)
        if isinstance(said, float):
            if abs(said - found) > 1e-6:
                wrong.append(f"{name} is {said}, should be {found}")
        elif said != found:
            short = isinstance(said, (int, str))
            wrong.append(f"{name} is {said}, should be {found}" if short else f"{name} differs")
    if part.lower_bound > part.overhead + 1e-6:
        wrong.append(f"lower_bound {part.lower_bound} is above the overhead {part.overhead}")
    return wrong


def is_for(plan: Plan, problem: Problem) -> bool:
    """Whether a plan is what would be made for a problem: of the same graph, costs and budget.

    Patterns go by the names of modules, which a fingerprint does not know: with them it is not.
    """
    if plan.pieces or plan.keep or plan.recompute or problem.keep or problem.recompute:
        return False
    same = plan.cost_fingerprint == problem.graph.fingerprint()
    return same and plan.budget_bytes == problem.budget_bytes


def matched(plan: Plan, graph: ComputationGraph) -> Schedule:
    """The plan's schedule on the graph of a model at hand.

    Raises:
        StalePlan: the plan is for another graph.
    """
    found = graph.fingerprint(costs=False)
    if found != plan.fingerprint and not _same_step(plan.graph, graph):
        raise StalePlan(
            f"the plan was made for another graph, of {len(plan.graph.operations)} operations "
            f"where this model and batch have {len(graph.operations)} (fingerprint "
            f"{plan.fingerprint}, here {found}{_other_torch(plan)}): another model, shapes, dtypes "
            "or torch. Make a new plan with planner.plan(...)"
        )
    try:
        return Schedule.from_order(graph, plan.order)
    except (ScheduleError, IndexError) as error:
        raise StalePlan(f"the plan's schedule does not run this graph: {error}") from error


def _same_step(one: ComputationGraph, other: ComputationGraph) -> bool:
    """Whether two graphs differ only in what a capture of varying sizes adds to its inputs."""
    first, second = (canonical(g).fingerprint(costs=False) for g in (one, other))
    return first == second


def _other_torch(plan: Plan) -> str:
    here = torch.__version__
    return (
        "" if plan.torch_version == here else f"; made with torch {plan.torch_version}, not {here}"
    )


def against(
    plan: Plan, model: torch.nn.Module, example_inputs: Any, hardware: str | None, optimizer: Any
) -> dict[str, Any]:
    """See `Plan.check_against`."""
    from planner.engine import Engine
    from planner.request import Request, check_inputs, check_model, inputs_of
    from tracer.errors import PlannerError

    if plan.pieces:
        raise PlannerError("a plan in pieces is checked when it is applied: the pieces are traced")
    check_model(model)
    inputs = inputs_of(model, example_inputs, None)
    if inputs is None:
        raise PlannerError("example_inputs is missing: pass the batch that the plan is for")
    check_inputs(model, inputs)
    engine = Engine(
        model, Request(plan.budget_bytes, optimizer, hardware=hardware, backend=plan.backend)
    )
    traced = engine.trace(inputs)
    graph = engine.extract(traced, inputs).graph
    price = simulate(graph, matched(plan, graph))
    state = dict(plan.breakdown).get("optimizer state", 0) if optimizer is None else 0
    peak = max(price.peak_bytes + state, plan.optimizer_peak_bytes)
    if peak > plan.budget_bytes:
        raise StalePlan(
            f"with the costs of this machine the plan peaks at {peak / 1e9:.4f} GB, over its "
            f"budget of {plan.budget_bytes / 1e9:.4f} GB: plan again here"
        )
    return {"operations": len(graph.operations), "peak_bytes": peak, "step_ns": price.time_ns}
