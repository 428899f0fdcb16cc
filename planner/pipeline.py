"""A stage of a pipeline: n micro-batches between their forward and their backward at one time.

In one-forward-one-backward schedules stage s of p holds the saved values of up to p - s
micro-batches, beside the peak of the one that runs (Narayanan et al. 2019, PipeDream; Narayanan et
al. 2021, arXiv 2104.04473). The peak of the stage is therefore

    peak of one micro-batch + (n - 1) * what one micro-batch leaves at the boundary.

The second term changes what is worth saving: a schedule that is best for one micro-batch saves too
much for n. Solvers know one micro-batch, so they are asked for several smaller budgets, and the
fastest answer whose stage fits is taken. Gradients count as existing, since all but the first
backward adds to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress

from planner.bounds import lower_bound
from planner.instance import Instance
from planner.linear import ProgramError
from planner.minimum import limiting, minimum_peak
from planner.problem import Problem, Solution
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph

LEVELS = 8  # budgets for one micro-batch that are tried

Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The answer for a stage.

    Attributes:
        problem: with the other micro-batches in the fixed part, as this answer leaves them.
        solution: for it.
        minimum_bytes, baseline_bytes: least peak found, and peak without recomputation.
    """

    problem: Problem
    solution: Solution
    minimum_bytes: int
    baseline_bytes: int


def solve_stage(
    problem: Problem, in_flight: int, floor: int, solve: Callable[[Problem], Solution]
) -> Stage:
    """The fastest schedule found whose stage keeps to the budget.

    Args:
        problem: of one micro-batch.
        in_flight: micro-batches between forward and backward, the one that runs included.
        floor: peak of the optimizer's step.
        solve: a solver for one micro-batch.

    Raises:
        InfeasibleBudget: no schedule fits; names the least budget found.
    """
    graph, budget = problem.graph, problem.budget_bytes
    candidates = list(_leanest(problem))
    least_single = min(_price(graph, order, 1)[0] for order in candidates)
    minimum = max(floor, min(_price(graph, order, in_flight)[0] for order in candidates))
    if budget < minimum:
        best = min(candidates, key=lambda order: _price(graph, order, in_flight)[0])
        raise InfeasibleBudget(
            budget, minimum, limiting(_with_others(graph, best, in_flight), best)
        )
    for level in range(LEVELS + 1):
        single = least_single + (budget - least_single) * level // LEVELS
        with suppress(InfeasibleBudget):
            candidates.append(solve(dataclasses.replace(problem, budget_bytes=single)).order)
    priced = [(*_price(graph, order, in_flight)[::-1], order) for order in candidates]
    _, _, order = min(p for p in priced if p[1] <= budget)
    plain, _ = _price(graph, save_all_order(graph), in_flight)
    complete = dataclasses.replace(problem, graph=_with_others(graph, order, in_flight))
    return Stage(complete, Solution(order, _bound(problem)), minimum, max(plain, floor))


def _leanest(problem: Problem) -> Iterable[Order]:
    """Orders of least peak: of one micro-batch, and with as little as possible saved."""
    graph = problem.graph
    yield minimum_peak(graph, problem.keep, problem.recompute)[1]
    droppable = {
        v
        for v in graph.candidates
        if v not in problem.keep
        and (producer := graph.values[v].producer) is not None
        and graph.operations[producer].recomputable
        and v in graph.operations[producer].outputs
        and graph.values[v].kind == "activation"
    }
    with suppress(InfeasibleBudget):
        yield minimum_peak(graph, problem.keep, droppable | problem.recompute)[1]


def stage_peak(graph: ComputationGraph, order: Order, in_flight: int) -> int:
    """Peak of a stage that runs micro-batches in this order of operations."""
    return _price(graph, order, in_flight)[0]


def _price(graph: ComputationGraph, order: Order, in_flight: int) -> tuple[int, int]:
    """Peak of the stage, and time of a micro-batch."""
    result = simulate(graph, Schedule.from_order(graph, order))
    return result.peak_bytes + (in_flight - 1) * _left(graph, order), result.time_ns


def _left(graph: ComputationGraph, order: Order) -> int:
    """Bytes that one micro-batch holds between forward and backward."""
    saved = simulate(graph, Schedule.from_order(graph, order)).boundary_bytes
    return saved + dict(graph.fixed_bytes).get("inputs", 0)


def _with_others(graph: ComputationGraph, order: Order, in_flight: int) -> ComputationGraph:
    others = ("other micro-batches in flight", (in_flight - 1) * _left(graph, order))
    return dataclasses.replace(graph, fixed_bytes=(*graph.fixed_bytes, others))


def _bound(problem: Problem) -> int:
    """No schedule of one micro-batch is faster, even if the others held nothing."""
    try:
        return lower_bound(Instance(problem), problem.budget_bytes, ())
    except ProgramError:
        return 0
