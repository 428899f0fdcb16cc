"""Ties a model to its plans: traces, prices, solves, and chooses the program of each step."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from planner.backends import INDUCTOR
from planner.checks import is_for, matched
from planner.data_parallel import Surroundings, unwrap
from planner.distributed import in_flight_bytes, shared_plan
from planner.parts import parts
from planner.piecewise import PiecewisePlanner
from planner.pipeline import LEVELS, solve_stage, stage_peak
from planner.plan import Plan
from planner.pricing import Pricing, optimizer_peak, resident
from planner.problem import Problem
from planner.program import StepProgram
from planner.progress import report
from planner.request import Inputs, Request, problems_of, sizes_by_tensor, without_labels
from planner.reuse import KEPT, NEAR, BorrowedCosts, Recent, covers, nearest, peak_of
from planner.sharded import Sharding, refuse_fsdp1, sharding_of
from planner.solvers import SOLVERS
from planner.solving import solve
from planner.summary import summarise
from planner.traced import Key, Traced
from runtime.execute import StepExecutor
from runtime.module import (
    install,
    is_installed,
    plain_call,
    uninstall,
    without_backward_hooks,
)
from runtime.torch_private import transformed
from tracer.capture import (
    CompiledForward,
    ForwardFailed,
    GraphBreak,
    JointGraph,
    not_holding,
    sizes_may_vary,
)
from tracer.errors import PlannerError
from tracer.extract import StepGraph, extract, likely_absent
from tracer.fused import moved_ahead
from tracer.graph import ComputationGraph

log = logging.getLogger("planner")


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
        model, self._wrapper = unwrap(model)
        refuse_fsdp1(model)
        self.model = model
        self._surroundings = Surroundings(model, self._wrapper, accumulates=request.in_flight > 1)
        self.request = request
        self.plan: Plan | None = None
        self._training: bool | None = model.training
        self._compiled = CompiledForward(model, self._executor)
        self._piecewise = PiecewisePlanner(self)
        self.programs: Recent[Key, StepProgram] = Recent(KEPT)  # those in force
        self._made: Recent[tuple[object, ...], list[tuple[Key, StepProgram]]] = Recent(KEPT)
        self._mode = threading.local()
        self._given: Plan | None = None
        self.listeners: list[Callable[[Plan], None]] = []

    # Planning

    def plan_for(self, inputs: Inputs) -> Plan:
        """The plan of a step. Nothing is computed, unless the forward is not one graph."""
        try:
            return self.make_plan(self.trace(inputs), inputs)
        except GraphBreak as broken:
            log.info("the forward is captured in pieces: %s", broken)
            return self._plan_without_hooks(inputs) or self._piecewise.look(inputs)

    def _plan_without_hooks(self, inputs: Inputs) -> Plan | None:
        """The plan as it would be without the backward hooks of modules, if only they break it.

        It tells what to expect without running anything; the first batch is planned with them.
        """
        broken = self._compiled
        try:
            with without_backward_hooks(self.model) as names:
                if not names:
                    return None
                self._compiled = CompiledForward(self.model, self._executor)
                plan = self.make_plan(self.trace(inputs), inputs)
        except GraphBreak:
            return None
        finally:
            self._compiled = broken
        note = (
            f"backward hooks of {', '.join(names[:3])} split the forward; the plan is made again, "
            "with them, at the first batch"
        )
        return dataclasses.replace(plan, notes=(*plan.notes, note), breaks=tuple(self.breaks))

    def trace(self, inputs: Inputs) -> Traced:
        """Captures the step for a batch; nothing is computed.

        Raises:
            GraphBreak: the forward is not one graph.
        """
        report("capturing the step")
        self._mode.capturing = True
        largest = sizes_by_tensor(self.model, inputs, self.request.dynamic)
        try:
            with torch.enable_grad(), sizes_may_vary((t, d) for t, d, _ in largest):
                self._compiled(*inputs.args, **inputs.kwargs)
        except _Captured as captured:
            return captured.traced.with_gradients().enlarged(largest)
        finally:
            self._mode.capturing = False
        raise PlannerError(
            "the model's forward needs no gradient for these inputs (an empty graph, or everything "
            "under torch.no_grad()): there is no backward pass to plan"
        )

    def make_plan(
        self,
        traced: Traced,
        inputs: Inputs | None = None,
        absent: frozenset[int] | None = None,
    ) -> Plan:
        """Prices and solves a captured step; `absent` as for `extract`.

        The plan in force serves a step that is the same to the last byte and nanosecond: torch
        captures again what a first forward has changed in passing (transformers notes the kind of
        loss in the model's config).
        """
        held = traced.held if traced.sizes or inputs is None else inputs
        step = self.extract(traced, held, absent)
        graph = step.graph
        budget, request = self.budget_for(graph.fixed), self.request
        (problem,) = problems_of([graph], budget, request.keep, request.recompute)
        if self.plan is not None and is_for(self.plan, problem):
            program = self.program_of(step, self.plan.order, budget)
            self.remember(self.plan, [*self.programs_of(self.plan), (traced.key(), program)])
            return self.plan

        def make() -> Plan:
            if self.request.in_flight > 1:
                return self._stage_plan(step, problem)
            start = time.perf_counter()
            floor = self.optimizer_floor(graph)
            solution, minimum = solve(problem, self.request, floor)
            seconds = time.perf_counter() - start
            return summarise(
                problem,
                solution,
                minimum_bytes=minimum,
                floor=floor,
                solver=solution.winner or self.request.solver,
                seconds=seconds,
                device=self.device_name,
                notes=(*self.notes([step]), *without_labels(self.model, inputs)),
                engine=self,
            )

        def peak(orders: Sequence[Sequence[int]]) -> int:
            return stage_peak(graph, tuple(orders[0]), self.request.in_flight)

        plan = shared_plan([problem], self.request, make, peak)
        plan = dataclasses.replace(plan, _engine=self)
        program = self.program_of(step, plan.order, plan.budget_bytes)
        self.remember(plan, [(traced.key(), program)])
        return plan

    def _stage_plan(self, step: StepGraph, problem: Problem) -> Plan:
        """The plan of a pipeline stage."""
        start, request = time.perf_counter(), self.request
        floor = self.optimizer_floor(step.graph)
        limit = request.time_limit / LEVELS
        stage = solve_stage(
            problem,
            request.in_flight,
            floor,
            lambda p: SOLVERS[request.solver](p, time_limit=limit),
        )
        plan = summarise(
            stage.problem,
            stage.solution,
            minimum_bytes=stage.minimum_bytes,
            floor=floor,
            solver=request.solver,
            seconds=time.perf_counter() - start,
            device=self.device_name,
            notes=self.notes([step]),
            engine=self,
        )
        return dataclasses.replace(plan, baseline_peak_bytes=stage.baseline_bytes)

    def extract(
        self,
        traced: Traced,
        inputs: Inputs | tuple[Any, ...],
        absent: frozenset[int] | None = None,
    ) -> StepGraph:
        """The computation graph of a captured graph; `inputs` of the whole step are held.

        `absent` are the tangents assumed not to arrive, by default the likely ones.
        """
        others = (
            ("gradient buckets", self._surroundings.unseen_bytes()),
            ("collectives in flight", in_flight_bytes(traced.joint)),
            *self.sharding.held,
            ("moved ahead by the compiler", self._moved_ahead(traced.joint)),
        )
        pricing = self.pricing
        return extract(
            traced.joint,
            pricing.costs,
            absent=likely_absent(traced.joint) if absent is None else absent,
            fixed_bytes=(
                *resident(pricing, self.model, inputs, self.request.optimizer),
                *(pair for pair in others if pair[1]),
            ),
            # Gradients that AOTAutograd puts together leave at the end: none is freed before.
            accumulate=traced.accumulate and traced.joint.one_to_one,
            few_slices=self.request.backend == INDUCTOR,
            progress=pricing.progress,
        )

    def _moved_ahead(self, joint: JointGraph) -> int:
        nodes = joint.module.graph.nodes
        return moved_ahead(nodes) if self.request.backend == INDUCTOR else 0

    def program_of(self, step: StepGraph, order: tuple[int, ...], budget: int) -> StepProgram:
        """What runs a step in this order."""
        return StepProgram(step, order, self.pricing.costs, budget, self.request.backend)

    def remember(self, plan: Plan, programs: list[tuple[Key, StepProgram]]) -> None:
        """Keeps the programs of a plan for when it is applied."""
        self._made.put(plan.key, programs)

    def programs_of(self, plan: Plan) -> list[tuple[Key, StepProgram]]:
        """What `remember` kept for a plan; nothing if it was read from a file or is long ago."""
        return self._made.get(plan.key) or []

    def budget_for(self, fixed: int) -> int:
        """The budget in bytes, with "auto" looked up."""
        budget = self.request.budget_bytes
        return self.pricing.automatic_budget(fixed) if budget is None else budget

    def optimizer_floor(self, graph: ComputationGraph) -> int:
        """Peak of the optimizer's step after this one."""
        return optimizer_peak(self.pricing, self.model, self.request.optimizer, graph)

    def notes(self, steps: Sequence[StepGraph]) -> tuple[str, ...]:
        """What the reader of a plan should know, said once."""
        return tuple(dict.fromkeys(note for step in steps for note in self.pricing.notes(step)))

    @property
    def device_name(self) -> str:
        return self.pricing.name

    @cached_property
    def pricing(self) -> Pricing:
        """The cost model and its device."""
        return Pricing.of(self.model, self.request)

    @property
    def breaks(self) -> list[str]:
        """Where the forward leaves a graph."""
        return self._compiled.breaks

    @property
    def sharding(self) -> Sharding:
        """What FSDP2 holds in a step."""
        return sharding_of(self.model)

    # Running

    def install(self, plan: Plan) -> torch.nn.Module:
        """Makes the model run by the plan."""
        self.activate(plan)
        self._training = self.model.training
        return self._install(plan)

    def install_pending(self, pending: object) -> torch.nn.Module:
        """Makes the model plan at its first batch, whatever its mode is then."""
        self._training = None
        return self._install(pending)

    def _install(self, plan: object) -> torch.nn.Module:
        install(self.model, self, plan)
        return self._show(plan)

    def _show(self, plan: object) -> torch.nn.Module:
        """Sets `plan` on the module, and on the wrapper that `plan()` was given."""
        outer = self._wrapper if self._wrapper is not None else self.model
        self.model.plan = outer.plan = plan  # type: ignore[assignment]
        return outer

    def activate(self, plan: Plan) -> Callable[..., Any]:
        """Makes the plan the one in force, and returns the call that runs it."""
        self._ask_as(plan)
        self.plan = plan
        made = self._made.get(plan.key)
        if made is None:  # read from a file: matched with the graph at the first batch
            self._given, self.programs = plan, Recent(KEPT)
        for key, program in made or ():
            self.programs.put(key, program)
        return self.train_call

    def _ask_as(self, plan: Plan) -> None:
        """What is planned from here on keeps to this plan's budget and patterns.

        They are not always those that the engine was made for: plans can be edited, or come from a
        frontier. Programs that were made for others are forgotten.
        """
        asked = dataclasses.replace(
            self.request,
            budget_bytes=plan.budget_bytes,
            keep=plan.keep,
            recompute=plan.recompute,
        )
        if asked != self.request:
            self.request = asked
            self.programs = Recent(KEPT)

    def adopt_plan(self, plan: Plan) -> None:
        """Puts a plan that was made while training in force."""
        self.activate(plan)
        if is_installed(self.model, self):
            self._show(plan)
        for tell in self.listeners:
            tell(plan)

    def plain(self) -> Callable[..., Any]:
        """The model's own call, without a plan."""
        return plain_call(self.model)

    def uninstall(self) -> torch.nn.Module:
        """Makes the model run as before."""
        if is_installed(self.model, self):
            uninstall(self.model)
        if self._wrapper is None:
            return self.model
        self._wrapper.__dict__.pop("plan", None)
        return self._wrapper

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="a plan is applied to this module: compile what is around it, without fullgraph"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call while a plan is applied; a graph break for who compiles around it.

        What has no backward pass to plan for (evaluation, `no_grad`) runs as before.
        """
        other_mode = self._training not in (None, self.model.training)
        if not torch.is_grad_enabled() or other_mode:
            return plain_call(self.model)(*args, **kwargs)
        if transformed():
            raise PlannerError(
                "a planned module cannot be transformed by torch.func (grad, vmap, jvp, ...) or "
                "differentiated in forward mode: call plan.remove() for such calls"
            )
        return self.train_call(*args, **kwargs)

    def train_call(self, *args: Any, **kwargs: Any) -> Any:
        """A forward call whose backward is to come."""
        try:
            if self._compiled.whole:
                try:
                    return self._compiled(*args, **kwargs)
                except GraphBreak as broken:
                    log.info("the forward is captured in pieces: %s", broken)
            return self._piecewise.run(Inputs(args, kwargs))
        except ForwardFailed:  # as the model itself would, with what it raises
            with torch.no_grad():
                self.plain()(*args, **kwargs)
            raise

    def call_compiled(self, inputs: Inputs) -> Any:
        """The captured graphs and the Python between them, as they are."""
        return self._compiled(*inputs.args, **inputs.kwargs)

    def _executor(self, joint: JointGraph) -> StepExecutor:
        return StepExecutor(joint, not_holding(self._choose))

    def traced(self, executor: StepExecutor, arguments: Sequence[Any]) -> Traced:
        """A captured graph and how it was called."""
        return Traced(executor, tuple(arguments), buckets=self._surroundings.buckets())

    def _choose(self, executor: StepExecutor, arguments: Sequence[Any]) -> StepProgram:
        traced = self.traced(executor, arguments)
        if not self._compiled.whole:
            return self._piecewise.choose(traced)
        if getattr(self._mode, "capturing", False):
            raise _Captured(traced)
        known = self.program_for(traced, 0, 0)
        absent = known.over if known is not None else None
        if known is None or absent is not None:
            log.info("planning for new sizes, other outputs used, or gradients that exist already")
            made = self.make_plan(traced, absent=absent)
            if made is self.plan:
                self.activate(made)
            else:
                self.adopt_plan(made)
            known = self.programs.get(traced.key())
        assert known is not None
        return known

    def program_for(self, traced: Traced, occurrence: int, position: int) -> StepProgram | None:
        """The program in force for a captured graph, if there is one.

        `occurrence` says how often this graph ran before in the step, `position` how many graphs.
        """
        key = traced.key(occurrence)
        known = self.programs.get(key)
        if known is None and self._given is not None:
            known = self._from_given(traced, position)
        if known is None and traced.binding:
            known = self._from_larger(traced, occurrence)
        if known is not None:
            self.programs.put(key, known)
        return known

    def _from_given(self, traced: Traced, position: int) -> StepProgram | None:
        assert self._given is not None
        pieces = parts(self._given)
        if position >= len(pieces):
            self._given = None
            return None
        last = position == len(pieces) - 1
        program = self._from_file(pieces[position], traced, last=last)
        if last:  # a batch that the plan is not for leaves it to the next one
            self._given = None
        return program

    def _from_larger(self, traced: Traced, occurrence: int) -> StepProgram | None:
        """The program for larger sizes of the same graph, if there is one within reach."""
        *same, binding = traced.key(occurrence)
        near = 0.0 if self.request.dynamic else NEAR
        found: StepProgram | None = nearest(
            (key[-1], program)
            for key, program in self.programs.items()
            if list(key[:-1]) == same and covers(key[-1], binding, near=near)
        )
        if found is None:
            return None
        step = extract(
            traced.joint,
            BorrowedCosts(found.step, self.pricing.costs.allocated),
            absent=found.step.absent,
            fixed_bytes=found.step.graph.fixed_bytes,
            accumulate=found.step.graph.accumulate,
            few_slices=found.step.graph.few_slices,
        )
        if peak_of(step, found.order) > found.budget_bytes:
            return None
        return self.program_of(step, found.order, found.budget_bytes)

    def _from_file(self, plan: Plan, traced: Traced, *, last: bool) -> StepProgram:
        """The program of a plan that was read, for the graph that the first batch gave."""
        step = self.extract(traced, traced.arguments, None if last else frozenset())
        matched(plan, step.graph)
        return self.program_of(step, plan.order, plan.budget_bytes)
