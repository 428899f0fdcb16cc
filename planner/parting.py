"""Where the bytes of a real step part ways with those of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from planner.program import StepProgram
from runtime.observe import held_at_marks, marked, marked_slices
from runtime.rewrite import Rewritten, Slice
from runtime.schedule import Compute, Schedule
from runtime.simulator import simulate
from tracer.graph import ComputationGraph

if TYPE_CHECKING:
    from planner.engine import Engine


@dataclass(frozen=True)
class Parting:
    """The first step of the schedule at which other bytes were held than predicted.

    Attributes:
        operation: name of the operation in the graph; op: its operator.
        what: "forward", "recompute" or "backward".
        module, source: module path and "file:line" of the call.
        predicted_bytes, measured_bytes: most bytes held while it ran, all that is held included.
        position: number of the operation in the order in which the step runs them.
    """

    operation: str
    op: str
    what: str
    module: str
    source: str
    predicted_bytes: int
    measured_bytes: int
    position: int

    def __str__(self) -> str:
        more = self.measured_bytes - self.predicted_bytes
        words = f"{abs(more):,} bytes {'more' if more > 0 else 'fewer'} than predicted"
        place = f" in {self.module}" if self.module else ""
        return f"{words}, first at {self.what} of {self.operation} ({self.op}{place})"


class ObservedProgram:
    """A program whose graphs are marked; see `runtime.execute.Program`."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self.ran = False

    @cached_property
    def rewritten(self) -> Rewritten:
        self.ran = True
        return marked(self.program.rewritten)

    def backward(self, absent: frozenset[int]) -> tuple[Slice, ...]:
        """The marked slices for a pattern of absent tangents."""
        if absent == self.program.step.absent:
            return self.rewritten.slices
        return marked_slices(self.program.backward(absent))

    @property
    def over(self) -> frozenset[int] | None:
        """As that of the program."""
        return self.program.over


def first_parting(
    engine: Engine, step: Callable[[], object], inputs: object, *, others: int, tolerance: int
) -> Parting | None:
    """Runs a step of the plan in force and finds the first parting; None if there is none.

    Args:
        engine: of the model.
        step: the planned forward and backward, warmed up.
        inputs: what the step holds beside the model.
        others: bytes that the plan counts and the step does not hold: the optimizer's state.
        tolerance: bytes of difference that are no parting.
    """
    with observed(engine) as programs:
        held = held_at_marks(step, engine.model, inputs)
    ran = [p.program for p in programs if p.ran]
    if len(ran) != 1:
        return None  # a step in pieces, which has no simulation of its own
    return _compared(ran[0], {k: v + others for k, v in held.items()}, tolerance)


@contextmanager
def observed(engine: Engine) -> Iterator[list[ObservedProgram]]:
    """Every program of the engine is marked for a while."""
    programs: Any = engine.programs
    before = list(programs.items())
    watching = [ObservedProgram(program) for _, program in before]
    for (key, _), watched in zip(before, watching, strict=True):
        programs.put(key, watched)
    try:
        yield watching
    finally:
        for key, program in before:
            programs.put(key, program)


def _compared(program: StepProgram, held: Mapping[int, int], tolerance: int) -> Parting | None:
    """Between two marks lies one operation, and what the graphs do not call: the caller's loss."""
    graph = program.step.graph
    schedule = Schedule.from_order(graph, program.order)
    predicted = simulate(graph, schedule).held_bytes
    marks = sorted(number for number in held if number >= 0)
    for mark, following in zip(marks, [*marks[1:], len(predicted)], strict=True):
        number = max(range(mark, following), key=lambda n: predicted[n])
        if abs(held[mark] - predicted[number]) > tolerance:
            return _parting(graph, schedule, number, predicted[number], held[mark])
    return None


def _parting(
    graph: ComputationGraph, schedule: Schedule, number: int, predicted: int, measured: int
) -> Parting:
    before = [s.op for s in schedule.steps[: number + 1] if isinstance(s, Compute)]
    op = graph.operations[before[-1]]
    what = "recompute" if op.index in before[:-1] else str(op.phase)
    place = op.module, op.source
    return Parting(op.name, op.target, what, *place, predicted, measured, len(before) - 1)


def tolerance_for(peak_bytes: int) -> int:
    """Differences that do not matter: a thousandth of the peak, and random-number states on CPU."""
    return max(16384, peak_bytes // 1000)


def zero_gradients(model: torch.nn.Module, existing: Mapping[str, torch.Tensor | None]) -> None:
    """Gradients as they are when they accumulate: those that existed, or else all of them."""
    some = any(g is not None for g in existing.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (not some or existing.get(name) is not None):
            parameter.grad = torch.zeros_like(parameter)
