"""The staged program: what is held at chosen moments, what runs again between them.

Checkmate's program (Jain et al. 2020, 1910.02653) on a chosen set of moments. A moment is a pair
(t, o): the first run of operation t if o = t; else, in the slot right before the backward operation
t, the last run of the forward operation o (o = -1: the start of the slot). The boundary is the
start of the first backward slot and always among them. Interval i ends at moment i. Columns:
a_{v,i}, forward value v is held at moment i; r_{o,i}, operation o runs again in interval i;
b_{o,i}, operation o runs again after moment i at all.

    minimise   sum time_o r_{o,i}
    kept:      a_{v,i} <= a_{v,i-1} + r_{producer(v),i}      unless v is first made in interval i
    inputs:    r_{o,i} <= a_{u,i-1} + r_{producer(u),i}      for each input u of o (and its state)
    read:      1 <= a_{v,i-1} + r_{producer(v),i}            for v read by first runs in interval i
    now:       a_{v,i} = 1 for what t touches at (t, t); >= r_{o,i} for what o touches at (t, o)
    memory:    base_i + sum size_v a_{v,i} + workspace_o r_{o,i} <= budget
    after:     b_{o,i} <= sum of r_{o,j} over j > i;  b_{o,i} <= a_{u,i} + b_{producer(u),i};
               1 <= a_{v,i} + b_{producer(v),i}              for v that first runs read after i

Every schedule satisfies these rows, whatever the moments are, so the optimum bounds all schedules;
more moments make it sharper. The `after` rows follow from the others for whole numbers; without
them the linear relaxation makes a value bit by bit in many intervals, each time from the same small
part of its inputs. With `hops`, operations may run again only in backward and near what it reads:
then there are fewer columns, and the optimum bounds nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from planner.instance import Instance
from planner.linear import Program, memory_unit

Moment = tuple[int, int]


@dataclass
class StagedProgram:
    """The program and its columns.

    Attributes:
        moments: in order, the boundary among them.
        held: for each moment the column of each value.
        again: for each interval, one more than moments, the column of each operation.
        memory: for each moment its memory row; `unit`: bytes that one of them counts as one.
    """

    program: Program
    moments: tuple[Moment, ...]
    held: list[dict[int, int]]
    again: list[dict[int, int]]
    memory: list[int]
    unit: float


def staged_program(
    instance: Instance, budget: int, moments: Iterable[Moment], hops: int | None = None
) -> StagedProgram:
    """Builds the program; `hops` limits how far from a read operations may run again."""
    return _Builder(instance, budget, moments, hops).build()


class _Builder:
    def __init__(
        self, instance: Instance, budget: int, moments: Iterable[Moment], hops: int | None
    ) -> None:
        self.instance = instance
        self.budget = budget
        self.unit = memory_unit(budget)
        boundary = (instance.boundary, -1)
        self.moments = tuple(sorted({boundary, *moments}))
        self.at_boundary = self.moments.index(boundary)
        self.program = Program("staged")
        self.base, self.between = base_memory(instance)
        self.last = last_needs(instance)
        self.reads = self._reads_by_interval()
        self.allowed = self._allowed(hops)
        self.held: list[dict[int, int]] = []
        self.again: list[dict[int, int]] = []

    def build(self) -> StagedProgram:
        count = len(self.moments)
        self.again = [self._again_columns(i) for i in range(count + 1)]
        for i in range(count):
            self.held.append(self._held_columns(i))
        for i in range(1, count + 1):
            self._interval_rows(i)
        memory = [self._memory_row(i) for i in range(count)]
        self._after_rows()
        return StagedProgram(self.program, self.moments, self.held, self.again, memory, self.unit)

    def _reads_by_interval(self) -> list[set[int]]:
        """Values that first runs read in each interval, the one at its moment included."""
        inst = self.instance
        reads: list[set[int]] = [set() for _ in range(len(self.moments) + 1)]
        for t in range(inst.count):
            i = bisect_left(self.moments, (t, t))
            reads[i].update(v for v in inst.reads[t] if inst.is_choice(v))
        return reads

    def _allowed(self, hops: int | None) -> list[set[int]]:
        """Operations that may run again in each interval."""
        inst = self.instance
        count = len(self.moments) + 1
        if hops is None:
            everything = {o for o in range(inst.boundary) if inst.again[o]}
            return [set()] + [everything] * (count - 1)
        near = [
            self._near(values, hops) if i > self.at_boundary else set()
            for i, values in enumerate(self.reads)
        ]
        near.append(set())
        # What the next interval needs may be made in this one.
        return [near[i] | near[i + 1] if i > self.at_boundary else set() for i in range(count)]

    def _near(self, values: Collection[int], hops: int) -> set[int]:
        inst = self.instance
        found: set[int] = set()
        front = {inst.producer[v] for v in values}
        for _ in range(hops):
            front = {o for o in front if o >= 0 and inst.again[o] and o not in found}
            found |= front
            front = {inst.producer[u] for o in front for u in inst.reads[o]}
        return found

    def _again_columns(self, i: int) -> dict[int, int]:
        """Columns of the operations that may run again in interval i and are of use there."""
        start = self.moments[i - 1][0] if i else 0
        return {
            o: self.program.column(f"again_{o}_{i}", float(self.instance.time[o]))
            for o in sorted(self.allowed[i])
            if self._ran(o, i) and any(self.last[v] >= start for v in self.instance.makes[o])
        }

    def _ran(self, o: int, i: int) -> bool:
        """Whether `o` runs first before interval i begins."""
        return i > 0 and (o, o) <= self.moments[i - 1]

    def _held_columns(self, i: int) -> dict[int, int]:
        """Columns of moment i; a value whose choice cannot change keeps the one it had."""
        inst, (t, o) = self.instance, self.moments[i]
        now = {*inst.reads[t], *inst.makes[t]} if o == t else set()
        before = self.held[i - 1] if i else {}
        result: dict[int, int] = {}
        for v, producer in enumerate(inst.producer):
            if not inst.is_choice(v) or (producer, producer) > (t, o):
                continue
            if v in now:
                result[v] = self.program.column(f"held_{v}_{i}", lower=1.0)
            elif self.last[v] < t or (i == self.at_boundary and v in inst.dropped):
                continue
            elif v in before and not self._may_change(v, i):
                result[v] = before[v]
            elif v in before or not self._ran(producer, i) or self._made_again(v, i):
                result[v] = self.program.column(f"held_{v}_{i}")
        return result

    def _made_again(self, v: int, i: int) -> bool:
        return any(self.instance.producer[v] in self.again[j] for j in range(i + 1))

    def _may_change(self, v: int, i: int) -> bool:
        """Whether interval i can make `v` again, or use it, after which it may be dropped."""
        return (
            v in self.reads[i]
            or self._made_again(v, i)
            or any(c in self.again[i] for c in self.instance.consumers[v])
            or (self.instance.producer[v] in self.again[i])
            or self.instance.state[self.instance.producer[v]] == v
        )

    def _ways(self, v: int, i: int) -> list[tuple[int, float]]:
        """Terms that are at least one if `v` can be read in interval i."""
        terms = [(self.held[i - 1][v], 1.0)] if v in self.held[i - 1] else []
        o = self.instance.producer[v]
        if o in self.again[i] and v != self.instance.state[o]:
            terms.append((self.again[i][o], 1.0))
        return terms

    def _interval_rows(self, i: int) -> None:
        row = self.program.row
        held = self.held[i] if i < len(self.held) else {}
        for v, column in held.items():
            ran = self._ran(self.instance.producer[v], i)
            if ran and self.held[i - 1].get(v) != column:
                row(f"kept_{v}_{i}", [*self._ways(v, i), (column, -1.0)], lower=0.0)
        for v in sorted(self.reads[i]):
            if self._ran(self.instance.producer[v], i):
                row(f"read_{v}_{i}", self._ways(v, i), lower=1.0)
        for o, column in self.again[i].items():
            for u in self._inputs(o):
                row(f"input_{o}_{u}_{i}", [*self._ways(u, i), (column, -1.0)], lower=0.0)

    def _inputs(self, o: int) -> list[int]:
        """Values that a second run of `o` needs and whose presence is a choice."""
        inst = self.instance
        inputs = inst.reads[o] if inst.state[o] < 0 else [*inst.reads[o], inst.state[o]]
        return [u for u in inputs if inst.is_choice(u)]

    def _memory_row(self, i: int) -> int:
        inst, (t, o) = self.instance, self.moments[i]
        terms = [(column, inst.size[v] / self.unit) for v, column in self.held[i].items()]
        if 0 <= o < t and o in self.again[i]:
            r = self.again[i][o]
            extra = inst.workspace[o] + sum(inst.size[v] for v in inst.makes[o] if inst.held[v])
            terms.append((r, extra / self.unit))
            for v in (*inst.reads[o], *inst.makes[o]):
                if v in self.held[i]:
                    now = [(self.held[i][v], 1.0), (r, -1.0)]
                    self.program.row(f"now_{o}_{v}_{i}", now, lower=0.0)
        base = self.base[t] if o == t else self.between[t]
        return self.program.row(f"memory_{i}", terms, upper=(self.budget - base) / self.unit)

    def _after_rows(self) -> None:
        """Rows `after`; those that repeat a row of a later moment are left out."""
        later: dict[int, list[int]] = {}
        after: dict[int, int] = {}
        reads: set[int] = set()
        known: set[tuple[int, ...]] = set()
        for i in range(len(self.moments) - 1, -1, -1):
            reads |= self.reads[i + 1]
            for o, column in self.again[i + 1].items():
                later.setdefault(o, []).append(column)
                after[o] = self.program.column(f"after_{o}_{i}", integer=False)
                terms = [*((c, 1.0) for c in later[o]), (after[o], -1.0)]
                self.program.row(f"after_{o}_{i}", terms, lower=0.0)
            for o, column in after.items():
                for u in self._inputs(o) if self._ran(o, i + 1) else ():
                    self._after_row(
                        f"after_{o}_{u}_{i}", self._after_ways(u, i, after), column, known
                    )
            for v in sorted(reads):
                if self._ran(self.instance.producer[v], i + 1):
                    self._after_row(f"after_read_{v}_{i}", self._after_ways(v, i, after), -1, known)

    def _after_ways(self, v: int, i: int, after: dict[int, int]) -> tuple[int, ...]:
        ways = [self.held[i][v]] if v in self.held[i] else []
        o = self.instance.producer[v]
        return (*ways, after[o]) if o in after and v != self.instance.state[o] else tuple(ways)

    def _after_row(
        self, name: str, ways: tuple[int, ...], user: int, known: set[tuple[int, ...]]
    ) -> None:
        """One of `ways` holds, if `user` does (-1: always)."""
        if (user, *ways) in known:
            return
        known.add((user, *ways))
        terms = [(column, 1.0) for column in ways]
        if user < 0:
            self.program.row(name, terms, lower=1.0)
        else:
            self.program.row(name, [*terms, (user, -1.0)], lower=0.0)


def base_memory(instance: Instance) -> tuple[list[int], list[int]]:
    """Bytes held, forward values that are a choice left out: (during each first run, before it).

    The second list ends with those held after the last operation.
    """
    order = range(instance.count)
    change, extra = instance.changes(order)
    for v, size in enumerate(instance.size):
        if instance.is_choice(v):
            o, readers = instance.producer[v], instance.consumers[v]
            change[o] -= size
            change[(readers[-1] if readers else o) + 1] += size
    base, between, current = [], [], instance.fixed
    for o in order:
        current += change[o]
        base.append(current + extra[o])
        made = sum(instance.size[v] for v in instance.makes[o] if not instance.is_choice(v))
        between.append(current - made)
    return base, [*between, current + change[-1]]


def last_needs(instance: Instance) -> list[int]:
    """For each forward value the last first run that reads it or what can be made from it."""
    last = [-1] * len(instance.size)
    for o in range(instance.boundary - 1, -1, -1):
        for v in instance.makes[o]:
            for c in instance.consumers[v]:
                last[v] = max(last[v], c)
                if c < instance.boundary and instance.again[c]:
                    last[v] = max([last[v], *(last[w] for w in instance.makes[c])])
        if instance.state[o] >= 0 and instance.again[o]:
            last[instance.state[o]] = max((last[v] for v in instance.makes[o]), default=-1)
    return last
