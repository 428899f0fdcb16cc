"""The staged program: what is held at chosen moments, what runs again between them.

Checkmate's program (Jain et al. 2020, 1910.02653) on a chosen set of moments. A moment is a pair
(t, o): the run of backward operation t if o = t; else, in the slot right before t, the last run of
the forward operation o (o = -1: the start of the slot). Moment 0 is the boundary, and interval i
lies between moments i - 1 and i. Columns: a_{v,i}, forward value v is held at moment i; r_{o,i},
operation o runs again in interval i.

    minimise   sum time_o r_{o,i}
    kept:      a_{v,i} <= a_{v,i-1} + r_{producer(v),i}
    inputs:    r_{o,i} <= a_{u,i-1} + r_{producer(u),i}      for each input u of o (and its state)
    read:      1 <= a_{v,i-1} + r_{producer(v),i}            for v that backward reads in interval i
    now:       a_{v,i} = 1 for inputs of t at (t, t); >= r_{o,i} for what o touches at (t, o)
    memory:    base_i + sum size_v a_{v,i} + workspace_o r_{o,i} <= budget

Every schedule satisfies these rows, whatever the moments are, so the optimum bounds all schedules;
more moments make it sharper. With `hops`, operations may run again only near what backward reads:
then it has fewer columns, finds schedules just as well, and bounds nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.instance import Instance
from planner.linear import Program, memory_unit

Moment = tuple[int, int]


@dataclass
class StagedProgram:
    """The program and its columns.

    Attributes:
        moments: without the boundary; moment i is `moments[i - 1]`.
        held: for each moment, the boundary first, the column of each value.
        again: for each interval, from 1 (0 is empty), the column of each operation.
        memory: for each moment, the boundary first, its memory row.
    """

    program: Program
    moments: tuple[Moment, ...]
    held: list[dict[int, int]]
    again: list[dict[int, int]]
    memory: list[int]


class _Builder:
    def __init__(
        self, instance: Instance, budget: int, moments: Sequence[Moment], hops: int | None
    ) -> None:
        self.instance = instance
        self.budget = budget
        self.unit = memory_unit(budget)
        self.moments = tuple(sorted(set(moments)))
        self.program = Program("staged")
        self.base, self.between = base_memory(instance)
        self.reads = self._reads_by_interval()
        self.allowed = self._allowed(hops)
        self.last = last_needs(instance)
        self.held: list[dict[int, int]] = []
        self.again: list[dict[int, int]] = []

    def build(self) -> StagedProgram:
        self._columns()
        for i in range(1, len(self.moments) + 2):
            self._interval_rows(i)
        memory = [self._memory_row(i) for i in range(len(self.moments) + 1)]
        if self.moments:
            self._after_rows()
        return StagedProgram(self.program, self.moments, self.held, self.again, memory)

    def _reads_by_interval(self) -> list[set[int]]:
        """Forward values that backward reads in each interval (reads at its moment included)."""
        inst = self.instance
        reads: list[set[int]] = [set() for _ in range(len(self.moments) + 2)]
        for t in range(inst.boundary, inst.count):
            i = bisect_left(self.moments, (t, t)) + 1
            reads[i].update(v for v in inst.reads[t] if self._choice(v))
        return reads

    def _choice(self, v: int) -> bool:
        o = self.instance.producer[v]
        return 0 <= o < self.instance.boundary and not self.instance.held[v]

    def _allowed(self, hops: int | None) -> list[set[int]]:
        """Operations that may run again in each interval."""
        inst = self.instance
        everything = {o for o in range(inst.boundary) if inst.again[o]}
        count = len(self.moments) + 2
        if hops is None:
            return [set(), *(everything for _ in range(1, count))]
        near = [self._near(values, hops) for values in self.reads]
        # What the next interval needs may be made in this one.
        return [set(), *(near[i] | (near[i + 1] if i + 1 < count else set())
                         for i in range(1, count))]

    def _near(self, values: Collection[int], hops: int) -> set[int]:
        inst = self.instance
        found: set[int] = set()
        front = {inst.producer[v] for v in values}
        for _ in range(hops):
            front = {o for o in front if o >= 0 and inst.again[o] and o not in found}
            found |= front
            front = {inst.producer[u] for o in front for u in inst.reads[o]}
        return found

    def _columns(self) -> None:
        inst = self.instance
        values = [v for v in range(len(inst.size)) if self._choice(v) and self.last[v] >= 0]
        column = {
            v: self.program.column(f"held_{v}_0") for v in values if v not in inst.dropped
        }
        self.held.append(column)
        self.again.append({})
        for i in range(1, len(self.moments) + 2):
            self.again.append(
                {
                    o: self.program.column(f"again_{o}_{i}", float(inst.time[o]))
                    for o in sorted(self.allowed[i])
                    if any(self.last[v] >= self._start(i) for v in inst.makes[o])
                }
            )
            if i > len(self.moments):
                break
            column = self._held_columns(i, values, column)
            self.held.append(column)

    def _start(self, i: int) -> int:
        """First backward operation of interval i."""
        return self.moments[i - 2][0] if i >= 2 else self.instance.boundary

    def _held_columns(self, i: int, values: list[int], before: dict[int, int]) -> dict[int, int]:
        """Columns of moment i; a value whose choice cannot change keeps the one it had."""
        t = self.moments[i - 1][0]
        forced = self.reads[i] if self.moments[i - 1][1] == t else set()
        forced = forced.intersection(self.instance.reads[t])
        result: dict[int, int] = {}
        for v in values:
            if self.last[v] < t:
                continue
            made_before = any(self.instance.producer[v] in self.again[j] for j in range(1, i + 1))
            if v in forced:
                name = f"held_{v}_{i}"
                result[v] = self.program.column(name, lower=1.0)
            elif v in before and not made_before and not self._touched(v, i):
                result[v] = before[v]
            elif v in before or made_before:
                result[v] = self.program.column(f"held_{v}_{i}")
        return result

    def _touched(self, v: int, i: int) -> bool:
        """Whether interval i can use `v`, after which it may be dropped."""
        return v in self.reads[i] or any(
            c in self.again[i] for c in self.instance.consumers[v] if c < self.instance.boundary
        )

    def _ways(self, v: int, i: int) -> list[tuple[int, float]]:
        """Terms that are at least one if `v` can be read in interval i."""
        terms = []
        if v in self.held[i - 1]:
            terms.append((self.held[i - 1][v], 1.0))
        o = self.instance.producer[v]
        if o in self.again[i] and v != self.instance.state[o]:
            terms.append((self.again[i][o], 1.0))
        return terms

    def _interval_rows(self, i: int) -> None:
        row = self.program.row
        held = self.held[i] if i < len(self.held) else {}
        for v, column in held.items():
            if self.held[i - 1].get(v) != column:
                row(f"kept_{v}_{i}", [*self._ways(v, i), (column, -1.0)], lower=0.0)
        for v in self.reads[i]:
            row(f"read_{v}_{i}", self._ways(v, i), lower=1.0)
        for o, column in self.again[i].items():
            for u in self.inputs(o):
                row(f"input_{o}_{u}_{i}", [*self._ways(u, i), (column, -1.0)], lower=0.0)

    def _after_rows(self) -> None:
        """What runs again after moment j at all, b_{o,j}, needs its inputs as a whole.

        Without these rows a linear relaxation makes a value bit by bit in many intervals, each
        time from the same small part of its inputs.
        """
        later: dict[int, list[int]] = {}
        columns: dict[int, int] = {}
        reads: set[int] = set()
        known: set[tuple[int, ...]] = set()
        for j in range(len(self.moments), -1, -1):
            reads |= self.reads[j + 1]
            for o, column in self.again[j + 1].items():
                later.setdefault(o, []).append(column)
                columns[o] = self.program.column(f"after_{o}_{j}")
                terms = [*((c, 1.0) for c in later[o]), (columns[o], -1.0)]
                self.program.row(f"after_{o}_{j}", terms, lower=0.0)
            for o, column in columns.items():
                for u in self.inputs(o):
                    self._after_row(f"after_{o}_{u}_{j}", j, u, columns, known, column)
            for v in sorted(reads):
                self._after_row(f"after_read_{v}_{j}", j, v, columns, known, None)

    def _after_row(
        self,
        name: str,
        j: int,
        v: int,
        columns: dict[int, int],
        known: set[tuple[int, ...]],
        user: int | None,
    ) -> None:
        ways = [self.held[j][v]] if v in self.held[j] else []
        o = self.instance.producer[v]
        if o in columns and v != self.instance.state[o]:
            ways.append(columns[o])
        key = (-1 if user is None else user, *ways)
        if key in known:
            return
        known.add(key)
        terms = [(column, 1.0) for column in ways]
        if user is None:
            self.program.row(name, terms, lower=1.0)
        else:
            self.program.row(name, [*terms, (user, -1.0)], lower=0.0)

    def inputs(self, o: int) -> list[int]:
        """Values that a second run of `o` needs and whose presence is a choice."""
        inst = self.instance
        inputs = inst.reads[o] if inst.state[o] < 0 else [*inst.reads[o], inst.state[o]]
        return [u for u in inputs if self._choice(u)]

    def _memory_row(self, i: int) -> int:
        inst = self.instance
        terms = [(column, inst.size[v] / self.unit) for v, column in self.held[i].items()]
        if i == 0:
            base = self.between[inst.boundary]
        else:
            t, o = self.moments[i - 1]
            base = self.base[t] if o == t else self.between[t]
            if 0 <= o < t and o in self.again[i]:
                r = self.again[i][o]
                extra = inst.workspace[o] + sum(inst.size[v] for v in inst.makes[o] if inst.held[v])
                terms.append((r, extra / self.unit))
                for v in (*inst.reads[o], *inst.makes[o]):
                    if v in self.held[i]:
                        self.program.row(
                            f"now_{o}_{v}_{i}", [(self.held[i][v], 1.0), (r, -1.0)], lower=0.0
                        )
        return self.program.row(f"memory_{i}", terms, upper=(self.budget - base) / self.unit)


def base_memory(instance: Instance) -> tuple[list[int], list[int]]:
    """Bytes held, forward values that are a choice left out: (while each backward operation runs,
    right before it).
    """
    order = range(instance.count)
    change, extra = instance.changes(order)
    for v, size in enumerate(instance.size):
        o = instance.producer[v]
        if 0 <= o < instance.boundary and not instance.held[v]:
            change[o] -= size
            last = instance.consumers[v][-1] if instance.consumers[v] else o
            change[last + 1] += size
    base, between, current = [], [], instance.fixed
    for o in order:
        current += change[o]
        base.append(current + extra[o])
        between.append(current - sum(instance.size[v] for v in instance.makes[o]))
    return base, between


def last_needs(instance: Instance) -> list[int]:
    """For each forward value the last backward operation that reads it or what is made from it."""
    last = [-1] * len(instance.size)
    for o in range(instance.boundary - 1, -1, -1):
        for v in (*instance.makes[o], instance.state[o]):
            if v < 0:
                continue
            for c in instance.consumers[v]:
                if c >= instance.boundary:
                    last[v] = max(last[v], c)
                elif instance.again[c]:
                    last[v] = max([last[v], *(last[w] for w in instance.makes[c])])
        if instance.state[o] >= 0 and instance.again[o]:
            last[instance.state[o]] = max(last[v] for v in instance.makes[o])
    return last


def staged_program(
    instance: Instance, budget: int, moments: Sequence[Moment], hops: int | None = None
) -> StagedProgram:
    """Builds the program; `hops` limits how far from a read operations may run again."""
    return _Builder(instance, budget, moments, hops).build()
