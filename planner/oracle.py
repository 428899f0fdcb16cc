"""Every schedule there is: the oracle, for tiny graphs.

Dijkstra's search over states (place, values held). A step goes to the next place, which runs the
next operation of the given order or passes the boundary, runs an operation again, or lets go of a
value. Optimal among all schedules that keep the order of first runs, however often they compute
again, in forward too. Values are let go only where something else does not fit, or when nothing
can need them any more: to hold more never hurts otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from planner.instance import Instance
from planner.staged_program import last_needs
from tracer.errors import PlannerError

STATES = 100_000
TINY = 20  # operations up to which the states are nearly always fewer

State = tuple[int, frozenset[int]]


class TooLarge(PlannerError):
    """The graph has too many states to look at all of them."""


def optimal_order(instance: Instance) -> tuple[int, ...] | None:
    """The order of least time within the instance's budget, None if there is none.

    Raises:
        TooLarge: there are too many states.
    """
    return _Search(instance, instance.budget).run()


def least_peak_order(instance: Instance, low: int, known: tuple[int, ...]) -> tuple[int, ...]:
    """An order of least peak; `low` bounds it, `known` is an order to start from.

    A budget at which there is none says what the next one to try is: the least memory of all steps
    that did not fit.

    Raises:
        TooLarge: there are too many states.
    """
    high = instance.peak(known)
    while low < high:
        middle = (low + high) // 2
        search = _Search(instance, middle)
        order = search.run()
        if order is None:
            low = search.refused
        else:
            known, high = order, instance.peak(order)
    return known


@dataclass(frozen=True)
class _Step:
    """A way on: the operation that runs (-1: none), where it leads, its time and its memory."""

    op: int
    after: State
    time: int
    memory: int


class _Search:
    """Attributes: `refused`, the least memory of all steps that did not fit so far."""

    def __init__(self, instance: Instance, budget: int) -> None:
        self.instance = instance
        self.budget = budget
        self.before: dict[State, tuple[State, int]] = {}
        self.last = self._last_reads()
        self.needed = last_needs(instance)
        self.refused = 1 << 62

    def _last_reads(self) -> dict[int, int]:
        """Last reader of each value that is made once: tangents and backward's temporaries."""
        inst = self.instance
        backward = range(inst.boundary, inst.count)
        never = 1 << 62  # nobody lets go of a tangent that is not read
        last = {v: inst.consumers[v][-1] if inst.consumers[v] else never for v in inst.tangents}
        for o in backward:
            for v in inst.makes[o]:
                if not inst.held[v]:
                    last[v] = inst.consumers[v][-1] if inst.consumers[v] else o
        return last

    def run(self) -> tuple[int, ...] | None:
        """Dijkstra by time; a tie goes to the state that is further on."""
        start: State = (0, frozenset())
        price = {start: 0}
        queue: list[tuple[int, int, int, State]] = [(0, 0, 0, start)]
        done: set[State] = set()
        number = 0
        while queue:
            time, _, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state[0] > self.instance.count:
                return self._order(state)
            if len(price) > STATES:
                raise TooLarge(f"more than {STATES} states")
            for step in self._fitting(state):
                new = time + step.time
                if new < price.get(step.after, 1 << 62):
                    price[step.after] = new
                    self.before[step.after] = (state, step.op)
                    number += 1
                    heapq.heappush(queue, (new, -step.after[0], number, step.after))
        return None

    def _fitting(self, state: State) -> Iterator[_Step]:
        """The steps that fit; if one does not, also letting go of any value that is a choice."""
        place, held = state
        refused = False
        for step in self._steps(state):
            if step.memory <= self.budget:
                yield step
            else:
                refused = True
                self.refused = min(self.refused, step.memory)
        for v in held if refused else ():
            if v not in self.last:
                yield _Step(-1, (place, held - {v}), 0, 0)

    def _order(self, state: State) -> tuple[int, ...]:
        order: list[int] = []
        while state in self.before:
            state, op = self.before[state]
            if op >= 0:
                order.append(op)
        return tuple(reversed(order))

    def _bytes(self, held: frozenset[int], first_runs: int) -> int:
        """Bytes held between operations; what is handed out counts from its first run on."""
        inst = self.instance
        total = inst.fixed + sum(inst.size[v] for v in held)
        for o in range(first_runs):
            total += sum(inst.size[v] for v in inst.makes[o] if inst.held[v])
            total -= sum(inst.size[v] for v in inst.released.get(o, ()))
        return total

    def _steps(self, state: State) -> Iterator[_Step]:
        inst, (place, held) = self.instance, state
        first = place - (place > inst.boundary)
        current = self._bytes(held, first)
        if place == inst.boundary:
            arrived = frozenset((held - inst.dropped) | set(inst.tangents))
            yield _Step(-1, (place + 1, arrived), 0, self._bytes(arrived, first))
            return
        yield from self._run(first, (place + 1, held), current, again=False)
        for o in range(min(first, inst.boundary)):
            if inst.again[o]:
                yield from self._run(o, state, current, again=True)

    def _run(self, o: int, state: State, current: int, *, again: bool) -> Iterator[_Step]:
        """Running `o`, if its inputs are held."""
        inst, (place, held) = self.instance, state
        s = inst.state[o]
        reads = [v for v in inst.reads[o] if not inst.held[v]]
        made = [v for v in inst.makes[o] if not inst.held[v]]
        if s >= 0:
            (reads if again else made).append(s)
        if not held.issuperset(reads):
            return
        handed = sum(inst.size[v] for v in inst.makes[o] if inst.held[v])
        memory = current + handed + sum(inst.size[v] for v in made) + inst.workspace[o]
        now = place - (place > inst.boundary)  # first runs from here on
        after = frozenset(v for v in held.union(made) if not self._dead(v, o, now))
        if after != held or not again:
            yield _Step(o, (place, after), inst.time[o], memory)

    def _dead(self, v: int, o: int, now: int) -> bool:
        """Whether no first run from `now` on can need `v`, now that `o` has run."""
        return self.last[v] <= o if v in self.last else self.needed[v] < now
