"""One integer program over every place where an operation could run again: exact, small graphs.

Checkmate's program (1910.02653) at the resolution of single operations. Before the first run of
each operation, in forward too, stands a slot in which every earlier operation may run again, in
order, PASSES times. Columns: R, the run at a place happens; a_{v,place}, value v is held after it.
It describes schedules exactly, so its optimum is a schedule; it is proven optimal among *all*
schedules if the staged program with every moment, which bounds all of them, has the same optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.bounds import safe_floor
from planner.instance import Instance
from planner.linear import Limits, Program, ProgramError, memory_unit
from planner.minimum import infeasible, unavoidable_peak
from planner.problem import Problem, Solution
from planner.staged_program import base_memory, last_needs, staged_program

PASSES = 2  # one is enough for nearly all graphs


@dataclass(frozen=True)
class _Place:
    """A run that happens (the first of `op`, slot = op) or may happen again before slot's."""

    slot: int
    op: int

    @property
    def again(self) -> bool:
        return self.op != self.slot


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """The optimum of the program; `exact` only with proof.

    Raises:
        InfeasibleBudget: the program has no solution.
        ProgramError: it was not solved within `time_limit`.
    """
    instance = Instance(problem)
    if problem.budget_bytes < unavoidable_peak(instance):
        raise infeasible(instance, problem.budget_bytes)
    places = _places(instance)
    program, runs = _program(instance, places)
    try:
        answer = program.solve(Limits(seconds=time_limit))
    except ProgramError as error:
        if error.infeasible:
            raise infeasible(instance, problem.budget_bytes) from error
        raise
    if not answer.values:
        raise ProgramError("ilp: no solution within the time limit", infeasible=False)
    order = tuple(p.op for i, p in enumerate(places) if not p.again or answer.values[runs[i]] > 0.5)
    time = instance.time_of(order)
    bound = min(time, _bound(instance, time_limit))
    return Solution(order, bound, answer.optimal and bound == time, "ilp")


def _bound(instance: Instance, time_limit: float) -> int:
    moments = [(t, t) for t in range(instance.count)]
    moments += [
        (t, o)
        for t in range(instance.boundary, instance.count)
        for o in range(-1, instance.boundary)
    ]
    try:
        answer = staged_program(instance, instance.budget, moments).program.solve(
            Limits(seconds=time_limit)
        )
    except ProgramError:
        return instance.graph.time_ns
    return instance.graph.time_ns + safe_floor(answer)


def _places(instance: Instance) -> list[_Place]:
    last = last_needs(instance)
    places: list[_Place] = []
    for t in range(instance.count):
        useful = [
            o
            for o in range(min(t, instance.boundary))
            if instance.again[o] and any(last[v] >= t for v in instance.makes[o])
        ]
        places += [_Place(t, o) for _ in range(PASSES) for o in useful]
        places.append(_Place(t, t))
    return places


def _program(instance: Instance, places: list[_Place]) -> tuple[Program, dict[int, int]]:
    """The program and the column of each run that may happen."""
    program = Program("ilp")
    unit = memory_unit(instance.budget)
    base, between = base_memory(instance)
    last = last_needs(instance)
    runs: dict[int, int] = {}
    held: dict[int, int] = {}
    for i, place in enumerate(places):
        o, s = place.op, instance.state[place.op]
        made = [v for v in instance.makes[o] if instance.is_choice(v)]
        reads = [v for v in instance.reads[o] if instance.is_choice(v)]
        if s >= 0:
            (reads if place.again else made).append(s)
        memory = [(column, instance.size[v] / unit) for v, column in held.items()]
        room = instance.budget - (between[place.slot] if place.again else base[o])
        size = sum(instance.size[v] for v in made)
        if place.again:
            run = runs[i] = program.column(f"again_{o}_{i}", float(instance.time[o]))
            handed = sum(instance.size[v] for v in instance.makes[o] if instance.held[v])
            memory.append((run, (size + handed + instance.workspace[o]) / unit))
        else:
            run = program.column(f"first_{o}", lower=1.0)
            room -= size
        program.row(f"memory_{i}", memory, upper=room / unit)
        for u in reads:
            terms = [(held[u], 1.0), (run, -1.0)] if u in held else [(run, -1.0)]
            program.row(f"reads_{u}_{i}", terms, lower=0.0)
        at_boundary = not place.again and o == instance.boundary - 1
        after: dict[int, int] = {}
        for v in (*held, *(v for v in made if v not in held)):
            if last[v] < place.slot or (at_boundary and v in instance.dropped):
                continue
            after[v] = program.column(f"held_{v}_{i}")
            terms = [(held[v], 1.0)] if v in held else []
            terms += [(run, 1.0)] if v in made else []
            program.row(f"kept_{v}_{i}", [*terms, (after[v], -1.0)], lower=0.0)
        held = after
    return program, runs
