"""What fits: the largest batch, sequence or model under a budget, and which is the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from planner.engine import Engine
from planner.family import Family
from planner.fit_result import Fit, FitPoint
from planner.minimum import minimum_peak
from planner.plan import Plan
from planner.pricing import after_backward
from planner.problem import Problem
from planner.progress import report
from planner.request import (
    Inputs,
    Request,
    check_inputs,
    check_model,
    checked,
    inputs_of,
    one_of,
    problems_of,
)
from planner.solving import solve
from planner.traced import Traced
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.errors import InfeasibleBudget, PlannerError
from tracer.graph import ComputationGraph

OVER = ("batch", "sequence", "layers")
_START = {"batch": 2, "sequence": 64, "layers": 2}
MOST = 1 << 20
_TRACES = 3  # kept, to be planned from


def fit(
    model: torch.nn.Module | Callable[..., torch.nn.Module],
    inputs: Callable[[int], Any],
    *,
    budget_gb: float | str,
    over: str = "batch",
    points: int | Sequence[int] | Callable[[int, int], Sequence[int]] = 6,
    multiple: int = 1,
    most: int = MOST,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    hardware: str | None = None,
    solver: str = "auto",
    time_limit: float = 60.0,
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
) -> Fit:
    """The largest batch, sequence or number of layers that fits a budget; nothing is executed.

    A few sizes are traced, the others derived from them (see `planner.family`). The answer itself
    is traced and planned. The curve says which size gives the most samples a second: the largest
    that fits is seldom the fastest.

    Args:
        model: a module, or a function that makes one; for `over="layers"` a function of the number
            of layers. It may be on the meta device with `hardware`.
        inputs: a function of the size that gives a batch, as `example_inputs` of `planner.plan`.
        budget_gb: as for `planner.plan`.
        over: what the size is: "batch", "sequence" or "layers".
        points: how many sizes the curve has, from the largest without recomputation to the largest
            with; or the sizes themselves; or a function that gives them, of both those sizes.
        multiple: only multiples of this are tried.
        most: the largest size to try; for a sequence what the model's positions allow.
        optimizer: as for `planner.plan`.
        device: as for `planner.plan`.
        hardware: as for `planner.plan`.
        solver: as for `planner.plan`.
        time_limit: seconds for each plan.
        keep: as for `planner.plan`.
        recompute: as for `planner.plan`.

    Returns:
        The answer, its plan, and the curve.

    Raises:
        InfeasibleBudget: not even the smallest size fits.
        PlannerError: base of all errors; an argument makes no sense, or `inputs` fails at a size.
    """
    request = checked(
        budget_gb=budget_gb,
        optimizer=optimizer,
        device=device,
        hardware=hardware,
        solver=solver,
        time_limit=time_limit,
        keep=keep,
        recompute=recompute,
    )
    one_of("over", over, OVER)
    if not 1 <= multiple <= most:
        raise PlannerError(f"multiple={multiple} must be from 1 to most={most}")
    _check_points(points)
    start = time.perf_counter()
    search = _Search(model, inputs, over, request, multiple, most // multiple * multiple)
    largest, plan = search.planned()
    plain = search.largest(search.plain_peak, required=False)
    sizes = _sizes(points, plain or search.smallest, largest, multiple)
    curve = tuple(search.point(size) for size in sorted({*sizes, largest} - {0}))
    return Fit(
        over=over,
        budget_bytes=search.budget,
        largest=largest,
        largest_plain=plain,
        plan=plan,
        curve=curve,
        traced=tuple(sorted(search.family.traced)),
        device=plan.device,
        seconds=time.perf_counter() - start,
    )


def _check_points(points: Any) -> None:
    """A number of sizes, or the sizes; a function is asked later."""
    given = [points] if isinstance(points, int) else [] if callable(points) else points
    for number in given:
        if not isinstance(number, int) or number < 1:
            raise PlannerError(f"points={number!r} is not a whole number from 1 on")


def _sizes(points: Any, low: int, high: int, multiple: int) -> list[int]:
    """Sizes of the curve; if only their number is given, spaced by a common factor."""
    if callable(points):
        points = points(low, high)
        _check_points(points)
    if not isinstance(points, int):
        return [n for n in points if n <= high]
    shares = [i / max(1, points - 1) for i in range(points)]
    return [max(1, round(low * (high / low) ** s / multiple)) * multiple for s in shares]


def _crossing(one: tuple[int, int], other: tuple[int, int], height: int) -> float:
    """Where the line through two points (size, bytes) reaches a height."""
    rise = other[1] - one[1]
    return other[0] + (height - other[1]) * (other[0] - one[0]) / rise if rise > 0 else math.inf


class _Search:
    """Sizes that were looked at, and what they need."""

    def __init__(
        self,
        model: Any,
        inputs: Callable[[int], Any],
        over: str,
        request: Request,
        multiple: int,
        most: int,
    ) -> None:
        self.over, self.request, self.multiple, self.most = over, request, multiple, most
        self._given, self._inputs = model, inputs
        self._shared: torch.nn.Module | None = None
        self.family = Family(self._traced)
        self.smallest = multiple
        self._plans: dict[int, Plan] = {}
        self._peaks: dict[tuple[str, int], int] = {}
        self._engine: Engine | None = None
        self._temporaries: dict[int, int] = {}
        self._latest: dict[int, tuple[Engine, Traced, Inputs]] = {}

    @cached_property
    def budget(self) -> int:
        if self.request.budget_bytes is not None:
            return self.request.budget_bytes
        size = next(iter(self.family.traced), self.multiple)
        graph = self.family.exactly(size)
        engine = next(iter(self._latest.values()))[0]
        return engine.budget_for(graph.fixed)

    # Sizes

    def planned(self) -> tuple[int, Plan]:
        """The largest size that fits, and its plan, which has the last word on what fits."""
        while True:
            size = self.largest(self.least_peak)
            try:
                return size, self.plan(size)
            except InfeasibleBudget as error:
                self._peaks["least_peak", size] = error.minimum_bytes

    def largest(self, peak: Callable[[int], int], *, required: bool = True) -> int:
        """The largest size with a peak within the budget; 0 if none fits and none is required."""
        while True:
            fits, beyond = self._bracket(peak)
            fits = self._narrow(peak, fits, beyond)
            if not fits:
                if required:
                    raise InfeasibleBudget(self.budget, peak(self.smallest))
                return 0
            if fits in self.family.traced:
                return fits
            self.family.exactly(fits)  # what was derived may change: look again
            self._peaks = {k: v for k, v in self._peaks.items() if k[1] in self.family.traced}

    def _bracket(self, peak: Callable[[int], int]) -> tuple[int, int]:
        """(a size that fits or 0, a larger one that does not or is not allowed)."""
        fits, size = 0, min(self.most, self._whole(_START[self.over] + self.multiple - 1))
        before = 0, -1
        while True:
            needed = peak(size)
            if needed > self.budget:
                return fits, size
            if size >= self.most:
                return size, self.most + self.multiple
            if before[1] < 0:  # what is held whatever the size is the other point
                before = 0, min(needed, self.family.exactly(min(self.family.traced)).fixed)
            reach = _crossing(before, (size, needed), self.budget)
            before, fits = (size, needed), size
            size = min(self.most, max(size + self.multiple, self._whole(min(reach, 64 * size))))

    def _narrow(self, peak: Callable[[int], int], fits: int, beyond: int) -> int:
        """The largest size that fits between two.

        The peak grows about linearly, so the line through both ends nearly always meets the answer;
        every third look halves the interval in case it does not.
        """
        look = 0
        while beyond - fits > self.multiple:
            middle = (fits + beyond) // 2
            if fits and beyond <= self.most and look % 3 < 2:
                ends = (fits, peak(fits)), (beyond, peak(beyond))
                middle = int(_crossing(*ends, self.budget))
            size = min(max(self._whole(middle), fits + self.multiple), beyond - self.multiple)
            if peak(size) <= self.budget:
                fits = size
            else:
                beyond = size
            look += 1
        return fits

    def _whole(self, size: float) -> int:
        """The next multiple below."""
        return int(size) // self.multiple * self.multiple

    # What sizes need

    def least_peak(self, size: int) -> int:
        """The least peak of any plan."""
        return self._peak("least_peak", size, self._least)

    def plain_peak(self, size: int) -> int:
        """The peak without recomputation."""
        return self._peak("plain_peak", size, self._plain)

    def _peak(self, name: str, size: int, of: Callable[[ComputationGraph], int]) -> int:
        if (name, size) not in self._peaks:
            graph = self.family.at(size).graph
            self._peaks[name, size] = max(of(graph), self._floor(size, graph))
        return self._peaks[name, size]

    def _least(self, graph: ComputationGraph) -> int:
        problem = self._problem(graph)
        return minimum_peak(graph, problem.keep, problem.recompute)[0]

    def _plain(self, graph: ComputationGraph) -> int:
        return simulate(graph, Schedule.from_order(graph, save_all_order(graph))).peak_bytes

    def _problem(self, graph: ComputationGraph) -> Problem:
        (problem,) = problems_of([graph], self.budget, self.request.keep, self.request.recompute)
        return problem

    def _floor(self, size: int, graph: ComputationGraph) -> int:
        """Peak of the optimizer's step; its temporaries are those of the nearest traced size."""
        if self.request.optimizer is None:
            return 0
        near = min(self._temporaries, key=lambda n: abs(n - size))
        return after_backward(graph) + self._temporaries[near]

    def point(self, size: int) -> FitPoint:
        """A plan's figures at a size."""
        if size in self._plans:
            plan = self._plans[size]
            rate = size * 1e9 / plan.step_ns
            return FitPoint(
                size,
                plan.step_ns,
                plan.peak_bytes,
                plan.overhead,
                plan.lower_bound,
                rate,
                True,
            )
        report(f"planning for {self.over} {size}")
        sized = self.family.at(size)
        graph, base = sized.graph, max(sized.graph.time_ns, 1)
        floor = self._floor(size, graph)
        solution, _ = solve(self._problem(graph), self.request, floor)
        price = simulate(graph, Schedule.from_order(graph, solution.order))
        return FitPoint(
            size,
            price.time_ns,
            max(price.peak_bytes, floor),
            (price.time_ns - base) / base,
            max(0, solution.bound_ns - base) / base,
            size * 1e9 / price.time_ns,
            sized.traced,
        )

    def plan(self, size: int) -> Plan:
        """The plan at a size, ready for `apply()`."""
        if size not in self._plans:
            if size not in self._latest:
                self._traced(size)
            engine, traced, inputs = self._latest[size]
            report(f"planning for {self.over} {size}")
            self._plans[size] = engine.make_plan(traced, inputs)
        return self._plans[size]

    # Tracing

    def _traced(self, size: int) -> ComputationGraph:
        report(f"tracing {self.over} {size}")
        model = self._model(size)
        check_model(model)
        try:
            given = self._inputs(size)
        except Exception as error:
            raise PlannerError(
                f"inputs({size}) raised {type(error).__name__}: {error}; it must return a batch "
                f"for {self.over} {size} (pass most= if that is too much)"
            ) from error
        inputs = inputs_of(model, given, None)
        if inputs is None:
            raise PlannerError(f"inputs({size}) returned None instead of a batch")
        check_inputs(model, inputs)
        if self._engine is None or self._engine.model is not model:
            self._engine = Engine(model, self.request)  # kept: captures serve several sizes
        engine = self._engine
        traced = engine.trace(inputs)
        graph = engine.extract(traced, inputs).graph
        if self.request.optimizer is not None:
            peak = engine.optimizer_floor(graph)
            self._temporaries[size] = peak - after_backward(graph)
        while len(self._latest) >= _TRACES:
            del self._latest[next(iter(self._latest))]
        self._latest[size] = engine, traced, inputs
        return graph

    def _model(self, size: int) -> torch.nn.Module:
        if isinstance(self._given, torch.nn.Module):
            if self.over == "layers":
                raise PlannerError(
                    'over="layers" needs a function of the number of layers as model, not a module'
                )
            return self._given
        if not callable(self._given):
            raise PlannerError(
                f"model is a {type(self._given).__name__}: pass a module or a function that makes "
                "one"
            )
        if self.over == "layers":
            made: torch.nn.Module = self._given(size)
            return made
        if self._shared is None:
            self._shared = self._given()
        return self._shared
