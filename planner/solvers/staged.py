"""The staged program, refined where its schedules do not fit.

Solve the program at the boundary alone; make the order that its answer describes; where that order
needs too much memory, add moments to the program; solve again. What is left over the budget is
repaired by local search. Each program is solved as a linear one, whose optimum is a bound, and then
as an integer one in which the columns that came out whole are fixed (RENS, Berthold 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.instance import Instance
from planner.linear import Answer, Limits, Program, ProgramError
from planner.minimum import infeasible
from planner.orders import staged_order
from planner.problem import Problem, Solution
from planner.search import reduce_order, repair_order
from planner.staged_program import Moment, StagedProgram, staged_program

HOPS = 20  # how far from a read operations may run again
ROUNDS = 4
MOMENTS = 12  # most moments added in one round
APART = 6  # least distance of moments added in one round, in backward operations
CLOSE = 1e-3  # gap, as a fraction of the step, at which to stop
NODES = 50


@dataclass
class Found:
    """Best order so far, the programs' least optimum, and the moments that decided it."""

    order: tuple[int, ...] = ()
    time_ns: int = 0
    binding: tuple[Moment, ...] = ()


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
        try:
            relaxed = staged.program.solve(relaxed=True)
        except ProgramError:
            return found
        found.binding = _binding(staged, relaxed)
        order = _orders(instance, staged, relaxed, found)
        target = instance.graph.time_ns * (1 + CLOSE) + relaxed.bound
        if found.order and found.time_ns <= target:
            return found
        new = violated(instance, order, moments)
        if not new:
            return found
        moments.update(new)
    return found


def _orders(
    instance: Instance, staged: StagedProgram, relaxed: Answer, found: Found
) -> list[int]:
    """Keeps the best repaired order of the linear and the integer answer; returns the last raw."""
    order: list[int] = []
    for answer in (relaxed, _integer(staged.program, relaxed, instance)):
        if answer is None:
            continue
        held = [{v for v, c in columns.items() if answer.values[c] > 0.5}
                for columns in staged.held]
        order = staged_order(instance, staged.moments, held)
        repaired = repair_order(instance, order, instance.budget)
        if repaired is not None:
            reduced = reduce_order(instance, repaired, instance.budget)
            time = instance.time_of(reduced)
            if not found.order or time < found.time_ns:
                found.order, found.time_ns = tuple(reduced), time
    return order


def _integer(program: Program, relaxed: Answer, instance: Instance) -> Answer | None:
    """Integer answer with the whole columns fixed: both sides if that works, else the ones."""
    limits = Limits(slack=CLOSE * instance.graph.time_ns, nodes=NODES)
    lower, upper = program.lower, program.upper
    ones = [1.0 if x > 1 - 1e-6 else low for x, low in zip(relaxed.values, lower, strict=True)]
    zeros = [max(low, 0.0) if x < 1e-6 else up
             for x, low, up in zip(relaxed.values, lower, upper, strict=True)]
    try:
        for program.lower, program.upper in ((ones, zeros), (ones, upper)):
            try:
                answer = program.solve(limits)
            except ProgramError:
                continue
            if answer.values:
                return answer
        return None
    finally:
        program.lower, program.upper = lower, upper


def _binding(staged: StagedProgram, relaxed: Answer) -> tuple[Moment, ...]:
    """Moments whose memory row has a price, dearest first."""
    price = {m: -relaxed.duals[staged.memory[i + 1]] for i, m in enumerate(staged.moments)}
    return tuple(sorted((m for m in price if price[m] > 1e-9), key=lambda m: (-price[m], m)))


def violated(instance: Instance, order: Sequence[int], known: set[Moment]) -> list[Moment]:
    """Moments at which an order is over the budget, the worst first, some distance apart."""
    worst: dict[Moment, int] = {}
    ran: set[int] = set()
    slot = instance.boundary
    for o, held in zip(order, instance.profile(order), strict=False):
        again = o in ran
        ran.add(o)
        if o < instance.boundary and not again:
            continue
        moment = (slot, o)
        if o >= instance.boundary:
            slot = o + 1
        if held > instance.budget and moment not in known:
            worst[moment] = max(worst.get(moment, 0), held)
    chosen: list[Moment] = []
    for moment in sorted(worst, key=lambda m: (-worst[m], m)):
        if all(abs(moment[0] - other[0]) > APART for other in chosen):
            chosen.append(moment)
        if len(chosen) == MOMENTS:
            break
    return chosen + [(t, -1) for t, o in chosen if o != t and (t, -1) not in known]
