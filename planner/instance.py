"""A problem in plain ints and lists, and the fast price of an order of operations.

Solvers price many thousand orders. `Instance.profile` gives the same numbers as
`Schedule.from_order` followed by the simulator, without making the steps; a test holds the two
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from planner.problem import Problem
from runtime.schedule import deliveries, save_all_order
from tracer.graph import Kind


class Instance:
    """The problem's graph, indexed.

    Attributes:
        count: number of operations; `boundary`: of them forward.
        reads, makes: for each operation the values that cost bytes while they are held.
        state: for each operation its random-number state, or -1.
        again: whether an operation may run more than once (the problem's `keep` included).
        held: whether a value, once made, is never freed by the schedule.
        evictable: whether a value is a choice that can be made again, states left out.
        dropped: values that must not be held at the boundary: the problem's `recompute`, as far
            as that is possible (outputs are held by the caller, some values cannot be made again).
        consumers: for each value the operations that read it, in order.
    """

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.graph = graph
        self.budget = problem.budget_bytes
        self.count = len(graph.operations)
        self.boundary = graph.boundary
        self.fixed = graph.fixed
        self.size = [v.nbytes for v in graph.values]
        self.producer = [-1 if v.producer is None else v.producer for v in graph.values]
        self.tangents = [v.index for v in graph.values if v.kind is Kind.TANGENT]
        counted = [v.producer is not None or v.kind is Kind.TANGENT for v in graph.values]
        self.reads = [[v for v in op.inputs if counted[v]] for op in graph.operations]
        self.makes = [list(op.outputs) for op in graph.operations]
        self.state = [-1 if op.state is None else op.state for op in graph.operations]
        self.time = [op.time_ns for op in graph.operations]
        self.workspace = [op.workspace for op in graph.operations]
        held = (Kind.RESIDENT, Kind.OUTPUT, Kind.GRADIENT)
        self.held = [v.kind in held for v in graph.values]
        self.consumers = graph.consumers
        self.again = [
            op.recomputable and not problem.keep.intersection(op.outputs) for op in graph.operations
        ]
        made = {v for op in graph.operations for v in op.outputs}  # states left out
        self.dropped = frozenset(
            v
            for v in problem.recompute
            if v in made and self.again[self.producer[v]] and not self.held[v]
        )
        states = {s for s in self.state if s >= 0}
        self.evictable = [
            self.is_choice(v) and self.again[o] and v not in states
            for v, o in enumerate(self.producer)
        ]
        self.released = self._releases()

    def at(self, budget: int) -> Instance:
        """The same problem within another budget."""
        other = copy(self)
        other.budget = budget
        return other

    def _releases(self) -> dict[int, list[int]]:
        """For each operation the gradients that leave right after it (if gradients accumulate)."""
        if not self.graph.accumulate:
            return {}
        order = save_all_order(self.graph)
        found = deliveries(self.graph, order, self.boundary)
        return {order[position]: list(values) for position, values in found.items()}

    def is_choice(self, v: int) -> bool:
        """Whether a solver decides how long `v` is held: made by forward, not handed out."""
        return 0 <= self.producer[v] < self.boundary and not self.held[v]

    def time_of(self, order: Sequence[int]) -> int:
        """Step time of an order, in ns."""
        return sum(self.time[o] for o in order)

    def peak(self, order: Sequence[int]) -> int:
        """Peak bytes of an order, fixed part included."""
        return max(self.profile(order), default=self.fixed)

    def profile(self, order: Sequence[int]) -> list[int]:
        """Bytes held while each operation of the order runs, workspace and fixed part included."""
        change, extra = self.changes(order)
        current = self.fixed
        result = []
        for delta, more in zip(change, extra, strict=False):
            current += delta
            result.append(current + more)
        if self.boundary == self.count:  # the tangents arrive after the last operation
            result.append(current + change[-1])
        return result

    def obeys(self, order: Sequence[int]) -> bool:
        """Whether an order holds none of `dropped` at the boundary, and repeats what it may."""
        first, boundary = self._first_runs(order)
        if any(not self.again[o] for position, o in enumerate(order) if first[o] != position):
            return False
        waiting = set(self.dropped)
        for o in order[boundary:]:
            if waiting.intersection(self.reads[o]):
                return False
            waiting.difference_update(self.makes[o])
        return True

    def changes(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """(change of the bytes held at each position, bytes held only while it runs).

        Walks backwards; `last[v]` is the last read of v before it is made again, -1 if none.
        """
        size, held = self.size, self.held
        total = len(order)
        first, boundary = self._first_runs(order)
        change = [0] * (total + 1)
        extra = [0] * total
        last = [-1] * len(size)
        for position in range(total - 1, -1, -1):
            o = order[position]
            once = first[o] == position
            extra[position] = self.workspace[o]
            s = self.state[o]
            for v in self.makes[o] if s < 0 or not once else (*self.makes[o], s):
                if held[v]:
                    (change if once else extra)[position] += size[v]
                    continue
                end = last[v] if last[v] >= 0 else position
                change[position] += size[v]
                change[end + 1] -= size[v]
                last[v] = -1
            for v in self.reads[o] if s < 0 or once else (*self.reads[o], s):
                if last[v] < 0:
                    last[v] = position
        for v in self.tangents:
            change[boundary] += size[v]
            if last[v] >= 0:
                change[last[v] + 1] -= size[v]
        for o, values in self.released.items():
            change[first[o] + 1] -= sum(size[v] for v in values)
        return change, extra

    def _first_runs(self, order: Sequence[int]) -> tuple[dict[int, int], int]:
        """(position of each operation's first run, position of the boundary)."""
        first: dict[int, int] = {}
        boundary = 0
        for position, o in enumerate(order):
            if o not in first:
                first[o] = position
                if o < self.boundary:
                    boundary = position + 1
        return first, boundary
