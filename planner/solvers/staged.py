"""The staged program, refined where its schedules do not fit.

Solve the program at the boundary alone; make the order that its answer describes; where that order
needs too much memory, add moments to the program; solve again. What is left over the budget is
repaired by local search. Each program is solved as a linear one, whose optimum is a bound, and then
as an integer one in which the columns that came out whole are fixed (RENS, Berthold 2014).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.instance import Instance
from planner.linear import Answer, Limits, ProgramError, memory_unit
from planner.minimum import infeasible
from planner.orders import staged_order
from planner.problem import Problem, Solution
from planner.search import Stuck, reduce_line, repair_line
from planner.staged_program import Moment, StagedProgram, staged_program
from planner.timeline import Timeline

HOPS = 20  # how far from a read operations may run again
ROUNDS = 3
MOMENTS = 8_000  # most moments added in one round, times forward operations
APART = 6  # least distance of moments added in one round, in backward operations
CLOSE = 1e-3  # gap, as a fraction of the step, at which to stop
NODES = 20
REPAIRS = 600  # evictions in one repair
COLUMNS = 60_000  # larger programs take too long
WHOLE = 14_000  # most columns of an integer program in which only the ones are fixed


@dataclass
class Found:
    """Best order so far, the programs' least optimum, and the moments that decided it."""

    order: tuple[int, ...] = ()
    time_ns: int = 0
    binding: tuple[Moment, ...] = ()

    def consider(self, instance: Instance, order: Sequence[int]) -> None:
        """Repairs and reduces an order and keeps it if it is the fastest so far."""
        line = Timeline(instance, order)
        try:
            repair_line(line, instance.budget, REPAIRS)
        except Stuck:
            return
        reduce_line(line, instance.budget)
        time = instance.time_of(line.order)
        if not self.order or time < self.time_ns:
            self.order, self.time_ns = tuple(line.order), time


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """Refines the staged program; bounded work, the same in every run."""
    del time_limit
    instance = Instance(problem)
    found = search(instance)
    if not found.order:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(found.order)


def search(instance: Instance) -> Found:
    """Rounds of solving, making the order, repairing it and adding moments."""
    found = Found()
    moments: set[Moment] = set()
    for _ in range(ROUNDS):
        staged = staged_program(instance, instance.budget, sorted(moments), HOPS)
        if len(staged.program.cost) > COLUMNS and found.order:
            break
        try:
            relaxed = staged.program.solve(relaxed=True)
        except ProgramError:
            break
        found.binding = _binding(instance, staged, relaxed)
        order = _orders(instance, staged, relaxed, found)
        target = instance.graph.time_ns * (1 + CLOSE) + relaxed.bound
        new = violated(instance, order, moments)
        if not new or (found.order and found.time_ns <= target):
            break
        moments.update(new)
    return found


def _orders(instance: Instance, staged: StagedProgram, relaxed: Answer, found: Found) -> list[int]:
    """Keeps the best repaired order of the linear and the integer answer; returns the last raw."""
    order: list[int] = []
    for answer in (relaxed, *_integer(staged, relaxed, instance)):
        held = [
            {v for v, c in columns.items() if answer.values[c] > 0.5} for columns in staged.held
        ]
        order = staged_order(instance, staged.moments, held)
        found.consider(instance, order)
    return order


def _integer(staged: StagedProgram, relaxed: Answer, instance: Instance) -> Iterator[Answer]:
    """The integer answer with columns fixed that are whole in a linear one.

    That of the program itself often leaves no room for the rest; those of slightly smaller budgets
    do. If all fail, only the ones are fixed.
    """
    program = staged.program
    lower, upper, row_upper = program.lower, program.upper, program.row_upper
    limits = Limits(slack=CLOSE / 2 * instance.graph.time_ns, nodes=NODES)
    try:
        for share in (0.003, 0.01, None):
            if share is None and len(program.cost) > WHOLE:
                return
            program.row_upper = row_upper[:]
            for row in staged.memory if share else ():
                program.row_upper[row] -= share * instance.budget / memory_unit(instance.budget)
            try:
                linear = program.solve(relaxed=True) if share else relaxed
                program.row_upper = row_upper
                program.lower = [
                    1.0 if x > 1 - 1e-6 else low for x, low in zip(linear.values, lower)
                ]
                if share:
                    program.upper = [low if x < 1e-6 else up
                                     for x, low, up in zip(linear.values, lower, upper)]
                answer = program.solve(limits)
            except ProgramError:
                continue
            finally:
                program.lower, program.upper, program.row_upper = lower, upper, row_upper
            if answer.values:
                yield answer
                return
    finally:
        program.row_upper = row_upper


def _binding(
    instance: Instance, staged: StagedProgram, relaxed: Answer
) -> tuple[Moment, ...]:
    """Moments whose memory row has a price, dearest first."""
    price = {
        m: -relaxed.duals[row]
        for m, row in zip(staged.moments, staged.memory, strict=True)
        if m != (instance.boundary, -1)
    }
    return tuple(sorted((m for m in price if price[m] > 1e-9), key=lambda m: (-price[m], m)))


def violated(instance: Instance, order: Sequence[int], known: set[Moment]) -> list[Moment]:
    """Moments at which an order is over the budget, the worst first, some distance apart."""
    worst: dict[Moment, int] = {}
    next_first = 0
    for o, held in zip(order, instance.profile(order), strict=False):
        moment = (next_first, o)
        if o == next_first:
            next_first += 1
        elif next_first < instance.boundary:
            continue  # runs again in forward: the program has no such moments
        if held > instance.budget and moment not in known:
            worst[moment] = max(worst.get(moment, 0), held)
    chosen: list[Moment] = []
    for moment in sorted(worst, key=lambda m: (-worst[m], m)):
        if all(_apart(instance, moment, other) for other in chosen):
            chosen.append(moment)
        if len(chosen) >= max(2, MOMENTS // max(1, instance.boundary)):
            break
    return chosen + [(t, -1) for t, o in chosen if o != t and (t, -1) not in known]


def _apart(instance: Instance, one: Moment, other: Moment) -> bool:
    """Whether two moments are far enough from each other to be worth a row each."""
    b = instance.boundary
    return abs(one[0] - other[0]) > APART or (one[0] < b) != (other[0] < b)
