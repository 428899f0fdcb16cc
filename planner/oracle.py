"""Every schedule there is: the oracle, for tiny graphs.

Dijkstra's search over states (place, values held). A step goes to the next place, which runs the
next operation of the given order or passes the boundary, runs an operation again, or lets go of a
value. Optimal among all schedules that keep the order of first runs, however often they compute
again, in forward too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from planner.instance import Instance
from tracer.errors import PlannerError

STATES = 400_000
TINY = 14  # operations up to which the states are few enough to look at all, always

State = tuple[int, frozenset[int]]
Price = tuple[int, int]


class TooLarge(PlannerError):
    """The graph has too many states to look at all of them."""


def optimal_order(instance: Instance) -> tuple[int, ...] | None:
    """The order of least time within the instance's budget, None if there is none.

    Raises:
        TooLarge: there are too many states.
    """
    return _Search(instance, instance.budget, peak_first=False).run()


def least_peak_order(instance: Instance) -> tuple[int, ...]:
    """The order of least peak, and among those of least time.

    Raises:
        TooLarge: there are too many states.
    """
    order = _Search(instance, None, peak_first=True).run()
    assert order is not None, "without a budget the given order itself is a schedule"
    return order


@dataclass(frozen=True)
class _Step:
    """A way on: the operation that runs (-1: none), where it leads, its time and its memory."""

    op: int
    after: State
    time: int
    memory: int


class _Search:
    def __init__(self, instance: Instance, budget: int | None, *, peak_first: bool) -> None:
        self.instance = instance
        self.budget = budget
        self.peak_first = peak_first
        self.before: dict[State, tuple[State, int]] = {}
        self.last = self._last_reads()

    def _last_reads(self) -> dict[int, int]:
        """Last reader of each value that is made once: tangents and backward's temporaries."""
        inst = self.instance
        backward = range(inst.boundary, inst.count)
        made_once = [*inst.tangents, *(v for o in backward for v in inst.makes[o])]
        return {
            v: inst.consumers[v][-1] if inst.consumers[v] else inst.producer[v]
            for v in made_once
            if not inst.held[v]
        }

    def run(self) -> tuple[int, ...] | None:
        """Dijkstra; prices are (peak, time) or (0, time)."""
        start: State = (0, frozenset())
        price: dict[State, Price] = {start: (0, 0)}
        queue: list[tuple[Price, int, int, State]] = [((0, 0), 0, 0, start)]
        done: set[State] = set()
        while queue:
            (peak, time), _, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state[0] > self.instance.count:
                return self._order(state)
            if len(price) > STATES:
                raise TooLarge(f"more than {STATES} states")
            for step in self._steps(state):
                if self.budget is not None and step.memory > self.budget:
                    continue
                new = (max(peak, step.memory) if self.peak_first else 0, time + step.time)
                if step.after not in price or new < price[step.after]:
                    price[step.after] = new
                    self.before[step.after] = (state, step.op)
                    heapq.heappush(queue, (new, -step.after[0], len(queue), step.after))
        return None

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
        for v in held:
            if v not in self.last:
                yield _Step(-1, (place, held - {v}), 0, 0)
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
        dead = {v for v in (*reads, *made) if v in self.last and self.last[v] <= o}
        yield _Step(o, (place, (held | set(made)) - dead), inst.time[o], memory)
