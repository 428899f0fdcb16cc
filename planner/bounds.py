"""Lower bounds on the step time of every schedule within a budget.

Boundary program. At the boundary a set of forward values is held, within the budget; whatever else
backward needs must be computed again at least once, from values that are held or computed again in
turn. That is true of every schedule, whatever it does later and however often it computes again, so
the least time of such a choice bounds all of them. Columns: s_v, value v is held; r_o, operation o
runs again after the boundary.

    minimise    sum time_o r_o
    needed:     s_v + r_producer(v) >= 1          for v that backward reads
    inputs:     s_u + r_producer(u) >= r_o        for each input u of o
    memory:     fixed + outputs + tangents + sum size_v s_v + sum state_o r_o <= budget

Where memory inside forward or backward binds, the staged program (`planner.staged_program`) with
rows for the moments that bind is sharper; its linear relaxation is nearly whole and solved in a
second for thousands of operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.instance import Instance
from planner.linear import NO_LIMITS, Answer, Limits, Program, ProgramError, memory_unit
from planner.staged_program import Moment, staged_program

_COLUMNS = 150_000  # larger programs take too long for what they add
_BOUNDARY_COLUMNS = 20_000  # branch and bound would take longer than all the rest of solving
BOUNDARY_LIMITS = Limits(gap=1e-4, nodes=200)


@dataclass(frozen=True)
class BoundaryAnswer:
    """Solution of the boundary program.

    Attributes:
        bound_ns: no schedule takes less step time.
        saved: values held at the boundary; `again`: operations that run again.
    """

    bound_ns: int
    saved: frozenset[int]
    again: frozenset[int]


def boundary_program(
    instance: Instance, budget: int
) -> tuple[Program, dict[int, int], dict[int, int]]:
    """The program and its columns: (program, s by value, r by operation)."""
    program = Program("boundary")
    b = instance.boundary
    r = {
        o: program.column(f"again_{o}", float(instance.time[o]))
        for o in range(b)
        if instance.again[o]
    }
    s: dict[int, int] = {}
    free = instance.fixed + sum(instance.size[v] for v in instance.tangents)
    for v, o in enumerate(instance.producer):
        if not 0 <= o < b or v == instance.state[o]:
            continue
        if instance.held[v]:
            free += instance.size[v]
        elif v not in instance.dropped:
            s[v] = program.column(f"saved_{v}")
    unit = memory_unit(budget)
    memory = [(column, instance.size[v] / unit) for v, column in s.items()]
    memory += [
        (column, instance.size[instance.state[o]] / unit)
        for o, column in r.items()
        if instance.state[o] >= 0
    ]
    program.row("memory", memory, upper=(budget - free) / unit)
    for v in _needed(instance):
        terms = _ways(instance, v, s, r)
        program.row(f"needed_{v}", terms, lower=1.0)
    for o, column in r.items():
        for u in instance.reads[o]:
            if not instance.held[u]:
                program.row(
                    f"input_{o}_{u}", [*_ways(instance, u, s, r), (column, -1.0)], lower=0.0
                )
    return program, s, r


def _needed(instance: Instance) -> list[int]:
    """Forward values that backward reads and that are not held anyway."""
    return [v for v in instance.graph.candidates if not instance.held[v]]


def _ways(
    instance: Instance, v: int, s: dict[int, int], r: dict[int, int]
) -> list[tuple[int, float]]:
    o = instance.producer[v]
    terms = [(s[v], 1.0)] if v in s else []
    return [*terms, (r[o], 1.0)] if o in r else terms


def solve_boundary(instance: Instance, budget: int, limits: Limits = NO_LIMITS) -> BoundaryAnswer:
    """Solves the boundary program; of a very large graph, with hundreds of layers, its relaxation.

    The bound is then a little weaker, and values and operations are those above one half.

    Raises:
        ProgramError: nothing fits at the boundary, or no answer within the limits.
    """
    program, s, r = boundary_program(instance, budget)
    answer = program.solve(limits, relaxed=len(program.cost) > _BOUNDARY_COLUMNS)
    return BoundaryAnswer(
        instance.graph.time_ns + safe_floor(answer),
        frozenset(v for v, column in s.items() if answer.values and answer.values[column] > 0.5),
        frozenset(o for o, column in r.items() if answer.values and answer.values[column] > 0.5),
    )


def lower_bound(
    instance: Instance, budget: int, moments: Sequence[Moment] = (), end: float = math.inf
) -> int:
    """Step time in ns that no schedule within the budget beats.

    The best of the boundary program and of staged programs with the first one, two, four of
    `moments`, which are best sorted by how much they bind. Any moments give valid bounds. Programs
    that are not solved by `end`, in seconds of the monotonic clock, are left out.

    Raises:
        ProgramError: `infeasible` if no schedule fits the budget at all.
    """
    bound = instance.graph.time_ns
    if instance.boundary == instance.count:
        return bound
    try:
        bound = max(bound, solve_boundary(instance, budget, _limits(end)).bound_ns)
        for count in sorted({min(n, len(moments)) for n in (1, 2, 4)} - {0}):
            program = staged_program(instance, budget, moments[:count]).program
            if len(program.cost) > _COLUMNS:
                break
            answer = program.solve(Limits(seconds=end - time.monotonic()), relaxed=True)
            bound = max(bound, instance.graph.time_ns + safe_floor(answer))
    except ProgramError as error:
        if error.infeasible:
            raise
    return bound


def _limits(end: float) -> Limits:
    return replace(BOUNDARY_LIMITS, seconds=end - time.monotonic())


def safe_floor(answer: Answer) -> int:
    """Whole ns that an answer's bound proves, less its solver's relative tolerance of 1e-6.

    A program that was stopped before its first relaxation was solved proves nothing.
    """
    if not math.isfinite(answer.bound):
        return 0
    return max(0, math.ceil(answer.bound * (1 - 1e-6) - 1e-3))
