"""The program of one captured step: rewritten graphs, for each pattern of absent tangents."""

from __future__ import annotations

import warnings
from functools import cached_property

from planner.backends import EAGER, INDUCTOR
from runtime.lowering import lowered
from runtime.rewrite import Rewritten, Slice, rewrite
from runtime.schedule import Schedule
from runtime.simulator import simulate
from tracer.costs import CostModel
from tracer.errors import PlannerError
from tracer.extract import StepGraph, extract


class StepProgram:
    """Runs an order of operations; see `runtime.execute.Program`.

    The order was found under the assumption that some tangents are absent. It is valid for every
    other pattern too: the slices for a pattern are made when it first occurs. If one was seen whose
    step does not fit the budget, `over` says what can be assumed absent from there on.
    """

    def __init__(
        self,
        step: StepGraph,
        order: tuple[int, ...],
        costs: CostModel,
        budget_bytes: int,
        backend: str = EAGER,
    ) -> None:
        self.step = step
        self.order = order
        self._costs = costs
        self._backend = backend
        self.budget_bytes = budget_bytes
        self.over: frozenset[int] | None = None
        self._slices: dict[frozenset[int], tuple[Slice, ...]] = {}

    @cached_property
    def rewritten(self) -> Rewritten:
        """The graphs for the pattern that was planned for."""
        return self._ready(rewrite(self.step, Schedule.from_order(self.step.graph, self.order)))

    def _ready(self, rewritten: Rewritten) -> Rewritten:
        return lowered(rewritten) if self._backend == INDUCTOR else rewritten

    def backward(self, absent: frozenset[int]) -> tuple[Slice, ...]:
        """The slices of the backward pass when these tangents do not arrive."""
        if absent == self.step.absent:
            return self.rewritten.slices
        if absent not in self._slices:
            self._slices[absent] = self._other_pattern(absent)
        return self._slices[absent]

    def _other_pattern(self, absent: frozenset[int]) -> tuple[Slice, ...]:
        graph = self.step.graph
        step = extract(
            self.step.joint,
            self._costs,
            absent=absent,
            fixed_bytes=graph.fixed_bytes,
            accumulate=graph.accumulate,
            few_slices=graph.few_slices,
        )
        schedule = Schedule.from_order(step.graph, self.order)
        peak = simulate(step.graph, schedule).peak_bytes
        if peak > self.budget_bytes:
            self.over = absent & self.step.absent
            warnings.warn(
                "gradients arrived at outputs that the plan assumed unused: this step peaks at "
                f"{peak / 1e9:.6g} GB, over the budget of {self.budget_bytes / 1e9:.6g} GB. The "
                "next is planned for them if the forward is one graph; otherwise return only the "
                "outputs that the loss uses, or plan with a larger budget.",
                stacklevel=2,
            )
        other = rewrite(step, schedule)
        if other.saved != self.rewritten.saved:
            raise PlannerError(
                "gradients arrived at other outputs than the plan assumed, and it did not save "
                "what they need; return only the outputs that the loss uses"
            )
        return self._ready(other).slices
