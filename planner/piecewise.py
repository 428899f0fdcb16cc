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
from planner.problem import Solution
from planner.program import StepProgram
from planner.request import Inputs, list_hint, problems_of
from planner.reuse import KEPT, Recent
from planner.solvers import SOLVERS
from planner.state import ModelState
from planner.summary import summarise
from runtime.recording import Recording
from tracer.errors import PlannerError, UntraceableModel
from tracer.extract import StepGraph, in_float32, loss_bytes
from tracer.graph import Kind

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.plan import Plan
    from planner.traced import Traced


class PiecewisePlanner:
    """The part of an engine that deals with forwards in pieces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._local = threading.local()
        self._steps: Recent[Any, StepGraph] = Recent(KEPT)
        self._least: Recent[Any, StepProgram] = Recent(KEPT)

    def run(self, inputs: Inputs) -> Any:
        """A forward call in training. A step that is new is planned when it has run."""
        recording, outputs = self._record(inputs)
        if recording.unknown:
            self._engine.adopt_plan(self._plan(recording, outputs, inputs))
        return outputs

    def look(self, inputs: Inputs) -> Plan:
        """Runs the forward once to see its pieces, and plans them."""
        engine = self._engine
        state = ModelState(engine.model, inputs.tensors())
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
                f"{list_hint(inputs)}"
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
        least = self._least.get(key)
        if least is None:
            step = self._step(traced, self._local.inputs)
            order = least_option(step.graph)
            least = self._engine.program_of(step, order, _any_budget(self._engine))
            self._least.put(key, least)
        return least

    def _record(self, inputs: Inputs) -> tuple[Recording, Any]:
        model = self._engine.model
        held = (*model.parameters(), *model.buffers())
        recording = Recording((*held, *inputs.tensors()))
        outer = getattr(self._local, "recording", None), getattr(self._local, "inputs", None)
        self._local.recording, self._local.inputs = recording, inputs
        try:
            with torch.enable_grad():
                outputs = self._engine.call_compiled(inputs)
        finally:
            self._local.recording, self._local.inputs = outer  # holds no batch between steps
        if not recording.calls:
            raise UntraceableModel(
                "torch found nothing in the model's forward that it can trace:\n"
                + "\n".join(self._engine.breaks)
                + "\nA loop in which a graph ends runs as Python, and torch captures no bare layer "
                "of torch.nn in it: put what the loop calls into a module of your own, or take "
                "away what ends the graph"
            )
        return recording, outputs

    def _step(self, traced: Traced, inputs: Inputs, *, last: bool = False) -> StepGraph:
        """The graph of a piece. Only of the last one may outputs be assumed unused."""
        key = traced.key(), last
        step = self._steps.get(key)
        if step is None:
            step = self._engine.extract(traced, inputs, None if last else frozenset())
            step = step if last else step.with_outside_loss(0)
            self._steps.put(key, step)
        return step

    def _plan(self, recording: Recording, outputs: Any, inputs: Inputs) -> Plan:
        engine = self._engine
        traced = [engine.traced(*call) for call in recording.calls]
        recording.finish(outputs, engine.model.parameters())
        steps = [self._step(t, inputs, last=t is traced[-1]) for t in traced]
        made = (in_float32(t, t.nbytes) for t in recording.differentiated)
        loss = loss_bytes(map(engine.pricing.costs.allocated, made))
        for i in reversed(range(len(steps))):  # the last that has a backward, which starts there
            own = steps[i].outside_loss
            if own is not None:
                steps[i] = steps[i].with_outside_loss(max(loss, own))
                break
        pieces = self._pieces(traced, steps, recording)
        plan = shared_plan(
            [p.problem for p in pieces],
            engine.request,
            lambda: self._solved(pieces),
            lambda orders: follow(pieces, orders)[0],
        )
        plan = dataclasses.replace(plan, _engine=engine)
        _, carried = follow(pieces, [p.order for p in plan.pieces])
        steps = [p.carrying(c) for p, c in zip(pieces, carried, strict=True)]
        engine.remember(plan, self._programs(traced, steps, plan))
        return plan

    def _solved(self, pieces: Sequence[Piece]) -> Plan:
        """The plan as this rank makes it."""
        engine, request = self._engine, self._engine.request
        start = time.perf_counter()
        budget = pieces[0].problem.budget_bytes
        choice = choose(pieces, budget, SOLVERS[request.solver], request.time_limit)
        steps = [p.carrying(c) for p, c in zip(pieces, choice.carried, strict=True)]
        plans = [
            summarise(
                dataclasses.replace(piece.problem, graph=step.graph),
                Solution(option.order),
                minimum_bytes=choice.minimum_bytes,
                floor=0,
                solver=request.solver,
                seconds=0.0,
                device=engine.device_name,
                notes=(),
                engine=None,
            )
            for piece, step, option in zip(pieces, steps, choice.options, strict=True)
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

    def _pieces(
        self, traced: Sequence[Traced], steps: Sequence[StepGraph], recording: Recording
    ) -> list[Piece]:
        engine, request = self._engine, self._engine.request
        graphs = [step.graph for step in steps]
        budget = engine.budget_for(graphs[0].fixed)
        problems = problems_of(graphs, budget, request.keep, request.recompute)
        later, pieces = 0, list[Piece]()
        waiting = recording.waiting()
        for i in reversed(range(len(traced))):
            held = engine.sharding.later(later) + waiting[i]
            if engine.sharding.gathered and not pieces:  # Python's own backward of what follows
                held += 2 * recording.largest
            between = recording.beside(i, graphs[i].bytes_of(Kind.OUTPUT))
            pieces.append(Piece(steps[i], problems[i], between, held))
            later += _parameter_gradients(traced[i], steps[i])
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
