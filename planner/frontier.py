"""The trade-off between memory and time, from one trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from planner.engine import Engine
from planner.minimum import minimum_peak
from planner.plan import Plan
from planner.problem import Problem, Solution
from planner.request import (
    Inputs,
    budget_bytes,
    check_inputs,
    check_model,
    checked,
    inputs_of,
    problems_of,
)
from planner.summary import summarise
from planner.sweep import sweep
from planner.traced import Traced
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.capture import GraphBreak
from tracer.errors import InfeasibleBudget, InvalidBudget, PlannerError, UntraceableModel
from tracer.extract import StepGraph

if TYPE_CHECKING:
    from tracer.graph import ComputationGraph

MOST = 200  # points


@dataclass(frozen=True)
class FrontierPoint:
    """One budget, and what the step costs within it.

    Attributes:
        budget_bytes: allowed at the peak; peak_bytes: what the schedule needs.
        saved_bytes: forward values held between forward and backward.
        overhead: added step time over the step that recomputes nothing, as a fraction.
        lower_bound: no schedule within the budget has less overhead; gap: (step time - bound's step
            time) / bound's step time.
        step_ns: predicted time of the step.
        status: "optimal" if overhead equals the bound, else "feasible".
        order: the schedule; see `Frontier.plan`.
    """

    budget_bytes: int
    peak_bytes: int
    saved_bytes: int
    overhead: float
    lower_bound: float
    gap: float
    step_ns: int
    status: str
    order: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Frontier:
    """Overhead against peak, from the least budget to the one that recomputes nothing.

    Attributes:
        points: by budget, the least first. Overhead and bound never rise from one to the next.
        minimum_peak_bytes: the least peak known; baseline_peak_bytes: of the step that recomputes
            nothing, and baseline_step_ns its predicted time.
        device: that the costs are of; solve_seconds: for all points together.
    """

    points: tuple[FrontierPoint, ...]
    minimum_peak_bytes: int
    baseline_peak_bytes: int
    baseline_step_ns: int
    device: str
    solve_seconds: float
    _made: _Made | None = field(default=None, repr=False, compare=False)

    def at(self, budget_gb: float) -> FrontierPoint:
        """The fastest point whose peak is within a budget.

        Raises:
            InfeasibleBudget: none is.
        """
        budget = _bytes(budget_gb)
        fitting = [p for p in self.points if p.peak_bytes <= budget]
        if not fitting:
            raise InfeasibleBudget(budget, min(p.peak_bytes for p in self.points))
        return min(fitting, key=lambda p: (p.step_ns, p.peak_bytes))

    def plan(self, budget_gb: float) -> Plan:
        """The plan of `at(budget_gb)`, ready for `apply()`; nothing is traced or solved again.

        Raises:
            InfeasibleBudget: no point is within the budget.
            PlannerError: the frontier was unpickled and knows no model.
        """
        point = self.at(budget_gb)
        if self._made is None:
            raise PlannerError(
                "this frontier was read as data and knows no model: call planner.frontier(...) "
                "again, or planner.plan(model, batch, budget_gb=...)"
            )
        return self._made.plan(point, self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name[0] != "_"}
        return {**data, "points": [{**asdict(p), "order": list(p.order)} for p in self.points]}

    def __getstate__(self) -> dict[str, Any]:
        """Pickled as data: the link to the model stays behind."""
        return {**self.__dict__, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __str__(self) -> str:
        rows = [
            f"Frontier for {self.device}, {len(self.points)} points in {self.solve_seconds:.1f} s",
            "budget GB   peak GB  saved GB  overhead  at least",
        ]
        rows += [
            f"{p.budget_bytes / 1e9:9.3f} {p.peak_bytes / 1e9:9.3f} {p.saved_bytes / 1e9:9.3f} "
            f"{p.overhead:9.2%} {p.lower_bound:9.2%}"
            for p in self.points
        ]
        return "\n".join(rows)


@dataclass(frozen=True, eq=False)
class _Made:
    """What a point's plan is made from."""

    engine: Engine
    traced: Traced
    step: StepGraph
    problem: Problem
    floor: int
    device: str
    notes: tuple[str, ...]

    def plan(self, point: FrontierPoint, frontier: Frontier) -> Plan:
        base = frontier.baseline_step_ns
        plan = summarise(
            replace(self.problem, budget_bytes=point.budget_bytes),
            Solution(point.order, base + round(point.lower_bound * base)),
            minimum_bytes=frontier.minimum_peak_bytes,
            floor=self.floor,
            solver="frontier",
            seconds=frontier.solve_seconds,
            device=self.device,
            notes=self.notes,
            engine=self.engine,
        )
        program = self.engine.program_of(self.step, plan.order, plan.budget_bytes)
        self.engine.remember(plan, [(self.traced.key(), program)])
        return plan


def frontier(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    points: int | Sequence[float] = 12,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    hardware: str | None = None,
    time_limit: float = 60.0,
    backend: str = "eager",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
) -> Frontier:
    """Overhead against peak memory for a range of budgets; one trace, nothing is executed.

    Args:
        model: as for `planner.plan`.
        example_inputs: as for `planner.plan`; a batch is needed here.
        example_kwargs: as for `planner.plan`.
        points: how many budgets, evenly spaced from the least feasible one to the peak of the step
            that recomputes nothing; or the budgets themselves, in gigabytes (1e9 bytes).
        optimizer: as for `planner.plan`.
        device: as for `planner.plan`.
        hardware: as for `planner.plan`.
        time_limit: seconds for solving all points; later ones then get simpler schedules.
        backend: as for `planner.plan`.
        keep: as for `planner.plan`.
        recompute: as for `planner.plan`.

    Returns:
        The points, by budget. Each is a schedule that fits, with the bound that is proven for it.

    Raises:
        InvalidBudget, InfeasibleBudget: one of the budgets in `points` is no budget, or too small.
        PlannerError: base of these, and of every other error that names an argument.
    """
    check_model(model)
    request = checked(
        budget_gb="auto",
        optimizer=optimizer,
        device=device,
        hardware=hardware,
        time_limit=time_limit,
        backend=backend,
        keep=keep,
        recompute=recompute,
    )
    wanted = _check_points(points)
    engine = Engine(model, request)
    inputs = inputs_of(model, example_inputs, example_kwargs)
    if inputs is None:
        raise PlannerError(
            "example_inputs is missing and the model has no example_input_array: a frontier needs "
            "a batch to trace the step with"
        )
    check_inputs(model, inputs)
    return _solve(prepare(engine, inputs), wanted, request.time_limit)


def prepare(engine: Engine, inputs: Inputs) -> _Made:
    """The step, traced and priced, and the problem without a budget."""
    try:
        traced = engine.trace(inputs)
    except GraphBreak as broken:
        raise UntraceableModel(
            f"a frontier needs a forward that is one graph; it is left at {broken}. Make single "
            "plans with planner.plan(...)"
        ) from broken
    step = engine.extract(traced, inputs)
    graph, request = step.graph, engine.request
    (problem,) = problems_of([graph], 0, request.keep, request.recompute)
    floor = engine.optimizer_floor(graph)
    name, notes = engine.device_name, engine.notes([step])
    return _Made(engine, traced, step, problem, floor, name, notes)


def _solve(made: _Made, wanted: int | list[int], time_limit: float) -> Frontier:
    problem, floor = made.problem, made.floor
    graph = problem.graph
    start = time.perf_counter()
    least, _ = minimum_peak(graph, problem.keep, problem.recompute)
    least = max(least, floor)
    plain = simulate(graph, Schedule.from_order(graph, save_all_order(graph)))
    most = max(plain.peak_bytes, least)
    budgets = evenly(least, most, wanted) if isinstance(wanted, int) else wanted
    if budgets[0] < least:
        raise InfeasibleBudget(budgets[0], least)
    solutions = sweep(problem, budgets, time_limit=time_limit)
    pairs = zip(budgets, solutions, strict=True)
    return Frontier(
        tuple(_point(graph, budget, solution, floor) for budget, solution in pairs),
        least,
        max(plain.peak_bytes, floor),
        graph.time_ns,
        made.device,
        time.perf_counter() - start,
        made,
    )


def _point(graph: ComputationGraph, budget: int, solution: Solution, floor: int) -> FrontierPoint:
    price = simulate(graph, Schedule.from_order(graph, solution.order))
    base = max(graph.time_ns, 1)
    bound = max(solution.bound_ns, graph.time_ns)
    return FrontierPoint(
        budget,
        max(price.peak_bytes, floor),
        price.boundary_bytes,
        (price.time_ns - graph.time_ns) / base,
        (bound - graph.time_ns) / base,
        (price.time_ns - bound) / max(bound, 1),
        price.time_ns,
        "optimal" if bound >= price.time_ns else "feasible",
        solution.order,
    )


def evenly(least: int, most: int, count: int) -> list[int]:
    """`count` budgets from `least` to `most`, both included."""
    if count == 1 or least == most:
        return [most]
    return [least + (most - least) * i // (count - 1) for i in range(count)]


def _check_points(points: int | Sequence[float]) -> int | list[int]:
    if isinstance(points, int) and not isinstance(points, bool):
        if not 1 <= points <= MOST:
            raise PlannerError(f"points={points} is not a number of points from 1 to {MOST}")
        return points
    if not isinstance(points, Sequence) or isinstance(points, str) or not points:
        raise PlannerError(
            f"points={points!r}: pass how many points, or a sequence of budgets in gigabytes"
        )
    return sorted({_bytes(p) for p in points})


def _bytes(budget_gb: float | str) -> int:
    budget = budget_bytes(budget_gb)
    if budget is None:
        raise InvalidBudget("budget_gb='auto' is not a point of a frontier: pass gigabytes")
    return budget
