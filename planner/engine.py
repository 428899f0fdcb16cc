"""Ties a model to its plans: traces, prices, solves, and chooses the program of each step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.instance import Instance
from planner.minimum import infeasible, minimum_peak
from planner.plan import Plan
from planner.pricing import Pricing, optimizer_peak, resident
from planner.problem import Problem, Solution
from planner.program import StepProgram
from planner.request import Inputs, Request, matching_values, removable
from planner.solvers import SOLVERS
from planner.summary import summarise
from runtime.execute import StepExecutor
from runtime.module import install, is_installed, plain_call, uninstall
from runtime.schedule import Schedule, ScheduleError
from tracer.capture import JointGraph, compile_forward
from tracer.errors import InfeasibleBudget, PlannerError, StalePlan
from tracer.extract import StepGraph, extract, likely_absent

log = logging.getLogger("planner")


@dataclass(frozen=True, eq=False)
class Traced:
    """One captured step: its executor and the arguments that the captured graph was called with."""

    executor: StepExecutor
    arguments: tuple[Any, ...]

    @property
    def joint(self) -> JointGraph:
        return self.executor.joint

    @property
    def accumulate(self) -> bool:
        """Whether gradients are there already, so that new ones are added to them."""
        return any(
            isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf and a.grad is not None
            for a in self.arguments
        )


_Key = tuple[StepExecutor, bool]


class _Captured(BaseException):
    """Leaves the compiled call at the moment where it would start to compute."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced


class Engine:
    """A model, what was asked for, and the programs made so far.

    A program belongs to a captured graph (one for each shape, by Dynamo's guards) and to whether
    gradients exist before the step, since both change what fits.
    """

    def __init__(self, model: torch.nn.Module, request: Request) -> None:
        self.model = model
        self.request = request
        self.plan: Plan | None = None
        self._training = model.training
        self._call = compile_forward(model, self._executor)
        self._programs: dict[_Key, StepProgram] = {}
        self._made: dict[tuple[int, ...], tuple[_Key, StepProgram]] = {}
        self._pricing: Pricing | None = None
        self._mode = threading.local()
        self._given: Plan | None = None

    # Planning

    def trace(self, inputs: Inputs) -> Traced:
        """Captures the step for a batch; nothing is computed."""
        self._mode.capturing = True
        try:
            with torch.enable_grad():
                self._call(*inputs.args, **inputs.kwargs)
        except _Captured as captured:
            return captured.traced
        finally:
            self._mode.capturing = False
        raise PlannerError(
            "the model's forward needs no gradient for these inputs (an empty graph, or everything "
            "under torch.no_grad()): there is no backward pass to plan"
        )

    def make_plan(self, traced: Traced, inputs: Inputs | None = None) -> Plan:
        """Prices and solves a captured step."""
        pricing = self._price()
        step = self._extract(traced, inputs)
        graph = step.graph
        budget = self.request.budget_bytes
        if budget is None:
            budget = pricing.automatic_budget(graph.fixed)
        problem = Problem(
            graph,
            budget,
            matching_values(graph, self.request.keep, "keep"),
            removable(graph, matching_values(graph, self.request.recompute, "recompute")),
        )
        start = time.perf_counter()
        floor = optimizer_peak(self.model, self.request.optimizer, graph)
        solution, minimum = _solve(problem, self.request, floor)
        seconds = time.perf_counter() - start
        plan = summarise(
            problem,
            solution,
            minimum_bytes=minimum,
            floor=floor,
            solver=solution.winner or self.request.solver,
            seconds=seconds,
            device=pricing.name,
            notes=pricing.notes(step),
            engine=self,
        )
        self._made[plan.order] = ((traced.executor, traced.accumulate), self._program(step, plan))
        return plan

    def _extract(self, traced: Traced, inputs: Inputs | None = None) -> StepGraph:
        joint = traced.joint
        absent = likely_absent(joint)
        return extract(
            joint,
            self._price().costs,
            absent=absent,
            fixed_bytes=resident(self.model, inputs or traced.arguments, self.request.optimizer),
            accumulate=traced.accumulate,
            progress=self._price().progress,
        )

    def _program(self, step: StepGraph, plan: Plan) -> StepProgram:
        return StepProgram(step, plan.order, self._price().costs, plan.budget_bytes)

    def _price(self) -> Pricing:
        if self._pricing is None:
            self._pricing = Pricing.of(self.model, self.request)
        return self._pricing

    # Running

    def install(self, plan: Plan) -> torch.nn.Module:
        """Makes the model run by the plan."""
        self.activate(plan)
        self._training = self.model.training
        install(self.model, self, plan)
        return self.model

    def install_pending(self, pending: object) -> torch.nn.Module:
        """Makes the model plan at its first batch."""
        self._training = self.model.training
        install(self.model, self, pending)
        return self.model

    def activate(self, plan: Plan) -> Callable[..., Any]:
        """Makes the plan the one in force, and returns the call that runs it."""
        self.plan = plan
        if plan.order in self._made:
            key, program = self._made[plan.order]
            self._programs[key] = program
        else:
            self._given = plan  # read from a file: matched with the graph at the first batch
        return self._call

    def plain(self) -> Callable[..., Any]:
        """The model's own call, without a plan."""
        return plain_call(self.model)

    def uninstall(self) -> torch.nn.Module:
        """Makes the model run as before."""
        if is_installed(self.model, self):
            uninstall(self.model)
        return self.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call while a plan is applied.

        What has no backward pass to plan for (evaluation, `no_grad`) runs as before.
        """
        if not torch.is_grad_enabled() or self.model.training != self._training:
            return plain_call(self.model)(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _executor(self, joint: JointGraph) -> StepExecutor:
        return StepExecutor(joint, self._choose)

    def _choose(self, executor: StepExecutor, arguments: Sequence[Any]) -> StepProgram:
        traced = Traced(executor, tuple(arguments))
        if getattr(self._mode, "capturing", False):
            raise _Captured(traced)
        key = executor, traced.accumulate
        if key not in self._programs:
            self._plan_again(traced)
        return self._programs[key]

    def _plan_again(self, traced: Traced) -> None:
        """A step that no plan was made for: another shape, or gradients that were not there."""
        if self._given is not None:
            given, self._given = self._given, None
            self._programs[traced.executor, traced.accumulate] = self._adopt(given, traced)
            return
        log.info("planning for a new shape, or for gradients that exist already")
        plan = self.make_plan(traced)
        self.activate(plan)
        if is_installed(self.model, self):
            self.model.plan = plan  # type: ignore[assignment]

    def _adopt(self, plan: Plan, traced: Traced) -> StepProgram:
        """A plan from a file, for the graph that the first batch gave."""
        step = self._extract(traced)
        fingerprint = step.graph.fingerprint(costs=False)
        if fingerprint != plan.fingerprint:
            raise StalePlan(
                f"the plan was made for another graph (fingerprint {plan.fingerprint}, this model "
                f"and batch have {fingerprint}; made with torch {plan.torch_version}, this is "
                f"{torch.__version__}): other model, shapes, dtypes or torch. Make a new plan with "
                "planner.plan(...)"
            )
        try:
            Schedule.from_order(step.graph, plan.order)
        except (ScheduleError, IndexError) as error:
            raise StalePlan(f"the plan's schedule does not run this graph: {error}") from error
        return self._program(step, plan)


def _solve(problem: Problem, request: Request, floor: int) -> tuple[Solution, int]:
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
    solution = SOLVERS[request.solver](problem, time_limit=request.time_limit)
    return solution, minimum
