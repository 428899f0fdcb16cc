"""Plans and runs a model whose forward torch captures in pieces.

The pieces of a step are known only when its forward has run, since Python between them decides what
comes next. A step that is not known yet runs each piece with the least memory; then the step is
planned, and the plan holds from the next step on. `plan()` runs such a forward once, in the same
way, and puts buffers and random-number states back.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from planner.distributed import shared_plan
from planner.merge import merged
from planner.pieces import Piece, choose, follow, least_option
from planner.problem import Problem, Solution
from planner.program import StepProgram
from planner.request import Inputs, pinned, removable
from planner.solvers import SOLVERS
from planner.state import ModelState
from planner.summary import summarise
from runtime.recording import Recording
from tracer.errors import PlannerError, UntraceableModel
from tracer.extract import StepGraph, likely_absent

if TYPE_CHECKING:
    from planner.engine import Engine, Traced
    from planner.plan import Plan


class PiecewisePlanner:
    """The part of an engine that deals with forwards in pieces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._local = threading.local()
        self._steps: dict[Any, StepGraph] = {}
        self._least: dict[Any, StepProgram] = {}

    def run(self, inputs: Inputs) -> Any:
        """A forward call in training. A step that is new is planned when it has run."""
        recording, outputs = self._record(inputs)
        if recording.unknown:
            self._engine.adopt_plan(self._plan(recording, outputs, inputs))
        return outputs

    def look(self, inputs: Inputs) -> Plan:
        """Runs the forward once to see its pieces, and plans them."""
        engine = self._engine
        state = ModelState(engine.model)
        try:
            recording, outputs = self._record(inputs)
            return self._plan(recording, outputs, inputs)
        except PlannerError:
            raise
        except Exception as error:
            where = "\n".join(engine.breaks)
            raise UntraceableModel(
                f"torch cannot trace the model's forward as one graph:\n{where}\n"
                f"and it cannot be run in pieces to see the rest: {type(error).__name__}: {error}"
            ) from error
        finally:
            state.restore(gradients=True)

    def choose(self, traced: Traced) -> StepProgram:
        """The program of a piece, at the moment when it is about to run."""
        recording: Recording | None = getattr(self._local, "recording", None)
        if recording is None:
            raise PlannerError("a part of a planned model was called outside of the model's call")
        position = len(recording.calls)
        occurrence = recording.add(traced.executor, traced.arguments)
        known = self._engine.program_for(traced, occurrence, position)
        if known is not None:
            return known
        recording.unknown = True
        key = traced.key()
        if key not in self._least:
            step = self._step(traced)
            order = least_option(step.graph)
            self._least[key] = self._engine.program_of(step, order, _any_budget(self._engine))
        return self._least[key]

    def _record(self, inputs: Inputs) -> tuple[Recording, Any]:
        model = self._engine.model
        held = (*model.parameters(), *model.buffers())
        recording = Recording((*held, *inputs.tensors()))
        outer = getattr(self._local, "recording", None)
        self._local.recording, self._local.inputs = recording, inputs
        try:
            with torch.enable_grad():
                outputs = self._engine.call_compiled(inputs)
        finally:
            self._local.recording = outer
        if not recording.calls:
            raise UntraceableModel(
                "torch found nothing in the model's forward that it can trace:\n"
                + "\n".join(self._engine.breaks)
            )
        return recording, outputs

    def _step(self, traced: Traced, *, last: bool = False) -> StepGraph:
        key = traced.key()
        if key not in self._steps:
            absent = likely_absent(traced.joint) if last else frozenset[int]()
            self._steps[key] = self._engine.extract(traced, self._local.inputs, absent)
        return self._steps[key]

    def _plan(self, recording: Recording, outputs: Any, inputs: Inputs) -> Plan:
        engine = self._engine
        traced = [engine.traced(*call) for call in recording.calls]
        pieces = self._pieces(traced, recording, outputs)
        budget = engine.budget_for(pieces[0].graph.fixed)
        problems = [Problem(p.graph, budget, p.keep, p.recompute) for p in pieces]
        plan = shared_plan(
            problems,
            engine.request,
            lambda: self._solved(pieces, problems),
            lambda orders: follow(pieces, orders)[0],
        )
        plan = dataclasses.replace(plan, _engine=engine)
        _, carried = follow(pieces, [p.order for p in plan.pieces])
        steps = [p.carrying(c) for p, c in zip(pieces, carried, strict=True)]
        engine.remember(plan, self._programs(traced, steps, plan))
        return plan

    def _solved(self, pieces: Sequence[Piece], problems: Sequence[Problem]) -> Plan:
        """The plan as this rank makes it."""
        engine, request = self._engine, self._engine.request
        start = time.perf_counter()
        budget = problems[0].budget_bytes
        choice = choose(pieces, budget, SOLVERS[request.solver], request.time_limit)
        steps = [p.carrying(c) for p, c in zip(pieces, choice.carried, strict=True)]
        plans = [
            summarise(
                dataclasses.replace(problem, graph=step.graph),
                Solution(option.order),
                minimum_bytes=choice.minimum_bytes,
                floor=0,
                solver=request.solver,
                seconds=0.0,
                device=engine.device_name,
                notes=(),
                engine=None,
            )
            for problem, step, option in zip(problems, steps, choice.options, strict=True)
        ]
        return merged(
            plans,
            bound_ns=choice.bound_ns,
            floor=engine.optimizer_floor(pieces[0].graph),
            seconds=time.perf_counter() - start,
            breaks=tuple(engine.breaks),
            notes=engine.notes(steps),
            engine=engine,
        )

    def _pieces(self, traced: list[Traced], recording: Recording, outputs: Any) -> list[Piece]:
        request = self._engine.request
        between = recording.between(outputs, self._engine.model.parameters())
        steps = [self._step(t, last=t is traced[-1]) for t in traced]
        graphs = [s.graph for s in steps]
        keep = pinned(graphs, request.keep, "keep")
        recompute = pinned(graphs, request.recompute, "recompute")
        sharding = self._engine.sharding
        later = 0
        pieces: list[Piece] = []
        for t, step, kept, dropped in reversed(
            list(zip(traced, steps, keep, recompute, strict=True))
        ):
            held = sharding.later(later)
            if sharding.gathered and not pieces:  # Python's own backward of what comes after it
                held += 2 * recording.largest
            pieces.append(Piece(step, kept, removable(step.graph, dropped), between, held))
            later += _parameter_gradients(t, step)
        return pieces[::-1]

    def _programs(
        self, traced: list[Traced], steps: list[StepGraph], plan: Plan
    ) -> list[tuple[Any, StepProgram]]:
        counts: dict[Any, int] = {}
        programs = []
        for t, step, piece in zip(traced, steps, plan.pieces, strict=True):
            occurrence = counts.get(t.executor, 0)
            counts[t.executor] = occurrence + 1
            program = self._engine.program_of(step, piece.order, plan.budget_bytes)
            programs.append((t.key(occurrence), program))
        return programs


def _any_budget(engine: Engine) -> int:
    """What a step that is not planned yet may hold: checked when its forward has run."""
    return engine.request.budget_bytes or 1 << 62


def _parameter_gradients(traced: Traced, step: StepGraph) -> int:
    """Bytes of new gradients that stay with their parameters after the piece's backward."""
    if step.graph.accumulate:
        return 0
    leaves = {
        v
        for argument, v in zip(traced.arguments, step.gradient_values, strict=False)
        if v is not None and isinstance(argument, torch.Tensor) and argument.is_leaf
    }
    return sum(step.graph.values[v].nbytes for v in leaves)
