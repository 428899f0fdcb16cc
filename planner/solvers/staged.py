"""The staged program, refined where its schedules do not fit.

Solve the program at the boundary alone; make the order that its answer describes; where that order
needs too much memory, add moments to the program; solve again. What is left over the budget is
repaired by local search. Each program is solved as a linear one, whose optimum is a bound, and then
as an integer one in which the columns that came out whole are fixed (RENS, Berthold 2014).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

import numpy as np

from planner.decisions import decisions
from planner.instance import Instance
from planner.linear import Answer, Limits, Program, ProgramError
from planner.minimum import infeasible
from planner.orders import staged_order
from planner.problem import Problem, Solution
from planner.search import Stuck, improve_order, reduce_line, repair_line
from planner.staged_program import Moment, StagedProgram, staged_program
from planner.timeline import Timeline

HOPS = 20  # how far from a read operations may run again
ROUNDS = 3
MOMENTS = 8_000  # most moments added in one round, times forward operations
APART = 6  # least distance of moments added in one round, in backward operations
CLOSE = 1e-3  # gap, as a fraction of the step, at which to stop
NODES = 20
TIGHTER = (0.003, 0.01)  # shares of the budget taken off before columns are fixed
TRIES = 60_000  # exchanges tried after each round, times operations
REPAIRS = 600  # evictions in one repair, at least; one for every 25 operations
COLUMNS = 150_000  # larger programs take too long
RINS_NODES = 50
RINS_SECONDS = 5.0
ONES_SECONDS = 3.0
WHOLE = 14_000  # most columns of an integer program in which only the ones are fixed


@dataclass
class Found:
    """Best order so far, its time, and the moments that decided the programs, latest first."""

    order: tuple[int, ...] = ()
    time_ns: int = 0
    binding: tuple[Moment, ...] = ()

    def consider(self, instance: Instance, order: Sequence[int], end: float = math.inf) -> None:
        """Repairs and reduces an order and keeps it if it is the fastest so far.

        One that holds at the boundary what it must not is left: a value that an answer makes again
        right before the boundary is made after it in the order, from what is held there.
        """
        line = Timeline(instance, order)
        try:
            repair_line(line, instance.budget, max(REPAIRS, instance.count // 25), end)
        except Stuck:
            return
        reduce_line(line, instance.budget)
        if instance.dropped and not instance.obeys(line.order):
            return
        time = instance.time_of(line.order)
        if not self.order or time < self.time_ns:
            self.order, self.time_ns = tuple(line.order), time


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """Refines the staged program; its work is bounded, the same in every run that has the time."""
    instance = Instance(problem)
    found = search(instance, end=time.monotonic() + time_limit)
    if not found.order:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(found.order)


def search(
    instance: Instance,
    known: Iterable[Moment] = (),
    rounds: int = ROUNDS,
    tries: int = TRIES,
    end: float = math.inf,
) -> Found:
    """Rounds of solving, making the order, repairing it and adding moments.

    The first round has the moments `known`. At `end`, in seconds of the monotonic clock, it stops.
    """
    found = Found()
    moments = set(known)
    for _ in range(rounds):
        staged = staged_program(instance, instance.budget, sorted(moments), HOPS)
        if len(staged.program.cost) > COLUMNS and found.order:
            break
        try:
            relaxed = staged.program.solve(Limits(seconds=end - time.monotonic()), relaxed=True)
        except ProgramError:
            break
        found.binding = tuple(dict.fromkeys((*_binding(instance, staged, relaxed), *found.binding)))
        order = _orders(instance, staged, relaxed, found, end)
        target = instance.graph.time_ns * (1 + CLOSE) + relaxed.bound
        if found.order and moments and found.time_ns > target:
            order = _agreed(instance, staged, relaxed, found, end) or order
            improved = improve_order(instance, found.order, tries, end)
            found.consider(instance, improved, end)
        new = violated(instance, order, moments)
        if not new or (found.order and found.time_ns <= target) or time.monotonic() > end:
            break
        moments.update(new)
    return found


def _agreed(
    instance: Instance, staged: StagedProgram, relaxed: Answer, found: Found, end: float
) -> list[int]:
    """The order of the integer program in which what relaxation and best order share is fixed.

    This is RINS (Danna, Rothberg and Le Pape 2005); [] if it finds nothing.
    """
    now = decisions(instance, staged, found.order)
    program = copy(staged.program)
    program.lower, program.upper = program.lower[:], program.upper[:]
    for column, value in now.items():
        if abs(relaxed.values[column] - value) < 1e-6:
            program.lower[column] = max(program.lower[column], value)
            program.upper[column] = min(program.upper[column], value)
    limits = Limits(nodes=RINS_NODES, seconds=min(RINS_SECONDS, end - time.monotonic()))
    try:
        answer = program.solve(limits, start=now)
    except ProgramError:
        return []
    if not answer.values:
        return []
    order = described(instance, staged, answer)
    found.consider(instance, order, end)
    return order


def described(instance: Instance, staged: StagedProgram, answer: Answer) -> list[int]:
    """The order that an answer describes."""
    held = [{v for v, c in columns.items() if answer.values[c] > 0.5} for columns in staged.held]
    return staged_order(instance, staged.moments, held)


def _orders(
    instance: Instance, staged: StagedProgram, relaxed: Answer, found: Found, end: float
) -> list[int]:
    """Keeps the best repaired order of the linear and the integer answer; returns the last raw."""
    order: list[int] = []
    for answer in (relaxed, *_integer(staged, relaxed, instance, end)):
        order = described(instance, staged, answer)
        found.consider(instance, order, end)
    return order


def _integer(
    staged: StagedProgram, relaxed: Answer, instance: Instance, end: float
) -> Iterator[Answer]:
    """The integer answer with columns fixed that are whole in a linear one, if there is one.

    The whole columns of the program itself often leave no room for the rest; those of slightly
    smaller budgets do. If they fail too, only the ones are fixed.
    """
    slack = CLOSE / 2 * instance.graph.time_ns
    program = staged.program
    for share in TIGHTER:
        try:
            limits = Limits(slack=slack, nodes=NODES, seconds=end - time.monotonic())
            tighter = _tighter(staged, share * instance.budget)
            linear = tighter.solve(limits, relaxed=True)
            answer = _fixed(program, linear, zeros=True).solve(limits)
        except ProgramError:
            continue
        if answer.values:
            yield answer
            return
    if len(program.cost) <= WHOLE:
        with suppress(ProgramError):
            limits = Limits(
                slack=slack, nodes=NODES, seconds=min(ONES_SECONDS, end - time.monotonic())
            )
            answer = _fixed(program, relaxed, zeros=False).solve(limits)
            yield from [answer] if answer.values else []


def _tighter(staged: StagedProgram, nbytes: float) -> Program:
    """The program with less memory at every moment."""
    program = copy(staged.program)
    program.row_upper = program.row_upper[:]
    for row in staged.memory:
        program.row_upper[row] -= nbytes / staged.unit
    return program


def _fixed(program: Program, answer: Answer, *, zeros: bool) -> Program:
    """The program with the columns fixed that are one in an answer (and with `zeros`, zero)."""
    program = copy(program)
    x, lower, upper = np.array(answer.values), np.array(program.lower), np.array(program.upper)
    program.lower = np.where(x > 1 - 1e-6, 1.0, lower).tolist()
    if zeros:
        program.upper = np.where(x < 1e-6, lower, upper).tolist()
    return program


def _binding(instance: Instance, staged: StagedProgram, relaxed: Answer) -> tuple[Moment, ...]:
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
