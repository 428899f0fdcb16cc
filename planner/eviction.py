"""DTR's greedy rule with a look ahead: run in order, evict when memory runs out.

Kirisame et al. 2021 (2006.09616): when an allocation does not fit, evict the value that is cheap to
make again, large, and not needed for long; when an evicted value is read, make it again. DTR sees
only the past; here the next use is known (Belady's rule), also that of values which evicted ones
will be made from.
"""

from __future__ import annotations

import math

from planner.instance import Instance

RUNS_PER_OPERATION = 40  # deeper recursion than that is given up as hopeless


class OutOfMemory(Exception):
    """Nothing is left that could be evicted, after `runs` runs of operations."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        super().__init__(runs)


class _Run:
    """One pass over the operations with at most `budget` bytes held."""

    def __init__(self, instance: Instance, budget: int, fresh: int) -> None:
        self.instance = instance
        self.budget = budget
        self.fresh = fresh
        self.order: list[int] = []
        self.there: set[int] = set()
        self.current = instance.fixed
        self.locks = [0] * len(instance.size)
        self.uses = [list(reversed(c)) for c in instance.consumers]
        self.next_use: list[float] = [u[-1] if u else math.inf for u in self.uses]
        self.now = 0
        self.ran: set[int] = set()
        self.queue: list[int] = []
        self.fresh_until = 0

    def run(self) -> list[int]:
        inst = self.instance
        for o in range(inst.count):
            self.now = o
            if o == inst.boundary:
                self._arrive()
            self._need(o)
            self._compute(o)
            for v in inst.reads[o]:
                self._used(v, o)
            for v in inst.released.get(o, ()):
                self._drop(v)
        return self.order

    def _arrive(self) -> None:
        inst = self.instance
        self._make_room(sum(inst.size[v] for v in inst.tangents))
        for v in inst.tangents:
            self._hold(v)
        for v in inst.dropped & self.there:
            self._evict(v)

    def _used(self, v: int, o: int) -> None:
        uses = self.uses[v]
        while uses and uses[-1] <= o:
            uses.pop()
        self.next_use[v] = uses[-1] if uses else math.inf
        if not uses and not self.instance.held[v] and not self._forward(v):
            self._drop(v)  # what forward made may be needed to make evicted values again

    def _forward(self, v: int) -> bool:
        return 0 <= self.instance.producer[v] < self.instance.boundary

    def _evictable(self, v: int) -> bool:
        return (
            self._forward(v)
            and self.instance.again[self.instance.producer[v]]
            and not self.instance.held[v]
        )

    def _hold(self, v: int) -> None:
        if v not in self.there:
            self.there.add(v)
            self.current += self.instance.size[v]

    def _drop(self, v: int) -> None:
        if v in self.there:
            self.there.discard(v)
            self.current -= self.instance.size[v]

    def _need(self, o: int) -> None:
        """Makes the inputs of `o` available and locks them."""
        inst = self.instance
        stack: list[tuple[int, bool]] = [(o, False)]
        pending: set[int] = set()
        while stack:
            op, ready = stack.pop()
            if ready:
                pending.discard(op)
                self._compute(op)
                for v in inst.reads[op]:
                    self.locks[v] -= 1
                continue
            if op != o:
                if op in pending or all(self._settled(v) for v in inst.makes[op]):
                    continue
                pending.add(op)
                stack.append((op, True))
            for v in inst.reads[op]:
                self.locks[v] += 1
            missing = dict.fromkeys(inst.producer[v] for v in inst.reads[op] if v not in self.there)
            stack += [(m, False) for m in missing]

    def _settled(self, v: int) -> bool:
        return v in self.there or not self.locks[v]

    def _compute(self, o: int) -> None:
        inst = self.instance
        made = inst.makes[o]
        if len(self.order) > RUNS_PER_OPERATION * inst.count:
            raise OutOfMemory(len(self.order))
        self._make_room(sum(inst.size[v] for v in made) + inst.workspace[o])
        self.order.append(o)
        first = o not in self.ran
        self.ran.add(o)
        for v in made:
            if not inst.held[v] or first:
                self._hold(v)
            if o >= inst.boundary and not self.uses[v] and not inst.held[v]:
                self._drop(v)
        if o == self.now:
            for v in inst.reads[o]:
                self.locks[v] -= 1

    def _make_room(self, nbytes: int) -> None:
        while self.current + nbytes > self.budget:
            self._evict(self._victim())

    def _victim(self) -> int:
        """Value of least rank. Ranks grow old slowly, so one sorted list serves several calls."""
        fresh = self.fresh_until > len(self.order)
        while True:
            while fresh and self.queue:
                v = self.queue.pop()
                if v in self.there and not self.locks[v]:
                    return v
            if not self._sort_queue():
                raise OutOfMemory(len(self.order))
            fresh = True

    def _sort_queue(self) -> bool:
        """Sorts what can be evicted, least rank last; False if there is nothing."""
        ranks = sorted(
            (-self._rank(v), v)
            for v in self.there
            if not self.locks[v] and self.instance.size[v] and self._evictable(v)
        )
        self.queue = [v for _, v in ranks]
        self.fresh_until = len(self.order) + max(self.fresh, len(ranks) // 32)
        return bool(ranks)

    def _rank(self, v: int) -> float:
        wait = self._next(v) - self.now + 1
        return self._cost(v) / (self.instance.size[v] * wait)

    def _next(self, v: int) -> float:
        """When `v` is read next, directly or to make an evicted value; the past is forgotten."""
        if self.next_use[v] < self.now:
            inst = self.instance
            uses = self.uses[v]
            made = (u for c in inst.consumers[v] if c < inst.boundary for u in inst.makes[c])
            later = (self.next_use[u] for u in made if u not in self.there)
            own = uses[-1] if uses else math.inf
            self.next_use[v] = min((n for n in later if n >= self.now), default=own)
            self.next_use[v] = min(self.next_use[v], own)
        return self.next_use[v]

    def _cost(self, v: int) -> float:
        """Time to make `v` again: its producer and, one step up, what that one misses."""
        inst = self.instance
        o = inst.producer[v]
        above = {inst.producer[u] for u in inst.reads[o] if u not in self.there}
        return inst.time[o] + sum(inst.time[p] for p in above) + 1.0

    def _evict(self, v: int) -> None:
        """Drops `v`; what it is made from is now needed when `v` is."""
        inst = self.instance
        self._drop(v)
        when = self._next(v)
        stack = [v]
        while stack:
            for u in inst.reads[inst.producer[stack.pop()]]:
                if self.next_use[u] > when:
                    self.next_use[u] = when
                    if u not in self.there:
                        stack.append(u)


def greedy_order(instance: Instance, budget: int, fresh: int = 8) -> list[int]:
    """An order whose peak is about `budget` at most.

    The random-number states (kilobytes) are not counted: judge the order with `Instance.peak`.
    Victims are sorted anew every `fresh` runs, less often where there are many: more is faster, and
    sometimes finds more.

    Raises:
        OutOfMemory: the rule found nothing to evict.
    """
    return _Run(instance, budget, fresh).run()
