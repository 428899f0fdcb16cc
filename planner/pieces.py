"""A forward that torch captures in pieces: all of them planned under one budget.

Between pieces Python runs, and what it saves for backward cannot be recomputed by us. While piece i
runs, forward or backward, the step holds what pieces 1 to i - 1 save, since backward comes back to
them last. For each piece some schedules of different peak and saved bytes are found, and a dynamic
program over (bytes saved so far, time) picks one for each so that every piece fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from planner.bounds import lower_bound
from planner.instance import Instance
from planner.linear import ProgramError
from planner.minimum import minimum_peak
from planner.problem import Problem, Solver
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.errors import InfeasibleBudget
from tracer.extract import StepGraph
from tracer.graph import ComputationGraph, Kind

LEVELS = 6  # budgets tried for each piece, between its least and its plain peak


@dataclass(frozen=True)
class Option:
    """One schedule of a piece.

    Attributes:
        order: operations. peak, saved: bytes beyond the fixed part, at the peak and from forward to
            backward (outputs left out, which count between the pieces). time_ns: of all of it.
    """

    order: tuple[int, ...]
    peak: int
    saved: int
    time_ns: int


@dataclass(frozen=True, eq=False)
class Piece:
    """A captured graph in its place in the step.

    Attributes:
        step: its graph; the fixed part is what the whole step holds.
        problem: what a solver is asked about it.
        between: bytes of tensors that cross between pieces, are returned, or that Python's own
            nodes save; without its own outputs, which are in its peak.
        later_gradients: bytes of gradients that exist when its backward runs: of the parameters of
            later pieces, and of what earlier pieces have made for later ones.
    """

    step: StepGraph
    problem: Problem
    between: int
    later_gradients: int

    @property
    def graph(self) -> ComputationGraph:
        return self.step.graph

    @property
    def around(self) -> int:
        """What the rest of the step holds beside the fixed part and what pieces save."""
        return self.between + self.later_gradients

    def carrying(self, saved: int) -> StepGraph:
        """The step with what the pieces before it save as part of what is held anyway."""
        held = (
            ("saved by earlier pieces", saved),
            ("between the pieces", self.between),
            ("gradients of later pieces", self.later_gradients),
        )
        fixed = (*self.graph.fixed_bytes, *(pair for pair in held if pair[1]))
        return dataclasses.replace(
            self.step, graph=dataclasses.replace(self.graph, fixed_bytes=fixed)
        )


@dataclass(frozen=True)
class Choice:
    """One option for each piece, the bytes saved before each, and a bound for the whole."""

    options: tuple[Option, ...]
    carried: tuple[int, ...]
    minimum_bytes: int
    bound_ns: int


def choose(pieces: Sequence[Piece], budget: int, solver: Solver, time_limit: float) -> Choice:
    """The fastest choice of options within the budget.

    Raises:
        InfeasibleBudget: no choice fits; the least that does is named.
    """
    known: dict[tuple[object, ...], tuple[Option, ...]] = {}
    table = []
    for piece in pieces:
        problem = piece.problem
        key = problem.graph.fingerprint(costs=True), problem.keep, problem.recompute
        if key not in known:
            known[key] = options_of(piece, solver, time_limit / len(pieces))
        table.append(known[key])
    minimum = _least(pieces, table)
    if budget < minimum:
        raise InfeasibleBudget(budget, minimum, pieces[0].graph.fixed_bytes)
    picked = _fastest(pieces, table, budget)
    assert picked is not None
    carried = [0]
    for option in picked:
        carried.append(carried[-1] + option.saved)
    bound = sum(_bound(piece) for piece in pieces)
    return Choice(tuple(picked), tuple(carried[:-1]), minimum, bound)


def follow(pieces: Sequence[Piece], orders: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]]:
    """Peak of the step under given orders, and the bytes saved before each piece.

    Raises:
        ScheduleError, IndexError: an order does not run its piece.
    """
    peak, carried = 0, [0]
    for piece, order in zip(pieces, orders, strict=True):
        option = _option(piece.graph, order)
        peak = max(peak, piece.graph.fixed + piece.around + carried[-1] + option.peak)
        carried.append(carried[-1] + option.saved)
    return peak, tuple(carried[:-1])


def options_of(piece: Piece, solver: Solver, time_limit: float) -> tuple[Option, ...]:
    """Schedules from the least peak to the plain one, none worse than another in every way."""
    graph = piece.graph
    least, order = minimum_peak(graph, piece.problem.keep, piece.problem.recompute)
    options = [_option(graph, order)]
    plain = Schedule.from_order(graph, save_all_order(graph))
    top = simulate(graph, plain).peak_bytes
    for level in range(1, LEVELS + 1):
        budget = least + (top - least) * level // LEVELS
        problem = dataclasses.replace(piece.problem, budget_bytes=budget)
        try:
            solution = solver(problem, time_limit=time_limit / LEVELS)
        except InfeasibleBudget:
            continue
        options.append(_option(graph, solution.order))
    return tuple(o for o in options if not any(_better(p, o) for p in options))


def least_option(graph: ComputationGraph) -> tuple[int, ...]:
    """The order of least peak, for a piece that runs before the whole step is known."""
    return minimum_peak(graph)[1]


def _option(graph: ComputationGraph, order: Sequence[int]) -> Option:
    schedule = Schedule.from_order(graph, order)
    result = simulate(graph, schedule)
    saved = max(0, result.boundary_bytes - graph.bytes_of(Kind.OUTPUT))
    return Option(tuple(order), result.peak_bytes - graph.fixed, saved, result.time_ns)


def _better(one: Option, other: Option) -> bool:
    """Whether `one` is at least as good in everything and better in something."""
    a, b = (one.peak, one.saved, one.time_ns), (other.peak, other.saved, other.time_ns)
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _fastest(
    pieces: Sequence[Piece], table: Sequence[Sequence[Option]], budget: int
) -> list[Option] | None:
    """Dynamic program over the pieces; states that save more and take longer are dropped."""
    states: list[tuple[int, int, tuple[Option, ...]]] = [(0, 0, ())]  # saved, time, picked
    for piece, options in zip(pieces, table, strict=True):
        room = budget - piece.graph.fixed - piece.around
        grown = [
            (saved + o.saved, time + o.time_ns, (*picked, o))
            for saved, time, picked in states
            for o in options
            if saved + o.peak <= room
        ]
        states = []
        for state in sorted(grown, key=lambda s: s[:2]):
            if not states or state[1] < states[-1][1]:
                states.append(state)
    best = min(states, key=lambda s: s[1], default=None)
    return None if best is None else list(best[2])


def _least(pieces: Sequence[Piece], table: Sequence[Sequence[Option]]) -> int:
    """The least budget for which some choice fits, by bisection."""
    low = 0
    high = sum(max(o.peak for o in options) for options in table)
    high += max(p.graph.fixed + p.around for p in pieces)
    while low < high:
        middle = (low + high) // 2
        if _fastest(pieces, table, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _bound(piece: Piece) -> int:
    """No schedule of the piece takes less time, even if the rest of the step held nothing."""
    instance = Instance(piece.problem)
    try:
        return max(lower_bound(instance, instance.budget, ()), piece.graph.time_ns)
    except ProgramError:
        return piece.graph.time_ns
