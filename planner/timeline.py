"""An order of operations whose price is kept up to date under small edits.

Taking out or putting in one run changes only the time for which the values that it touches are
held, so an edit is priced by a few additions to ranges of the memory profile (numpy), in tens of
microseconds, where pricing the whole order takes milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.instance import Instance

_NEVER: list[int] = []


class Timeline:
    """An order on a line of rows; a row is one run or empty (-1).

    Attributes:
        rows: operation at each row, -1 where a run was taken out.
        memory: bytes held while each row runs. An empty row holds what is held at that moment.
        made, read: for each value the rows that make it and those that read it, in order.
    """

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        self.instance = instance
        self.rows: list[int] = []
        self.load(order)

    def load(self, order: Sequence[int]) -> None:
        """Starts again from an order."""
        inst = self.instance
        self.memory: NDArray[np.int64] = np.array(inst.profile(order), dtype=np.int64)
        # Where nothing is left to run when the tangents arrive, that moment is a row, too.
        self.rows = [*order, *[-1] * (len(self.memory) - len(order))]
        self.made: dict[int, list[int]] = {}
        self.read: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}
        for row, o in enumerate(order):
            once = o not in self.first
            for v in self._writes(o, once):
                self.made.setdefault(v, []).append(row)
            for v in self._reads(o, once):
                self.read.setdefault(v, []).append(row)
            self.first.setdefault(o, row)

    def _writes(self, o: int, once: bool) -> list[int]:
        s = self.instance.state[o]
        return [*self.instance.makes[o], s] if once and s >= 0 else self.instance.makes[o]

    def _reads(self, o: int, once: bool) -> list[int]:
        s = self.instance.state[o]
        return self.instance.reads[o] if once or s < 0 else [*self.instance.reads[o], s]

    @property
    def order(self) -> list[int]:
        return [o for o in self.rows if o >= 0]

    @property
    def peak(self) -> int:
        return int(self.memory.max())

    def again(self) -> list[int]:
        """Rows that run an operation again."""
        return [row for row, o in enumerate(self.rows) if o >= 0 and self.first[o] != row]

    def hold_end(self, v: int, row: int) -> int:
        """Last row at which the copy of `v` that row `row` uses is held."""
        made, read = self.made.get(v, _NEVER), self.read.get(v, _NEVER)
        k = bisect_right(made, row)
        start = made[k - 1] if k else -1
        r = bisect_right(read, made[k]) if k < len(made) else len(read)
        last = read[r - 1] if r else -1
        return last if last > start else start

    def without(self, row: int) -> NDArray[np.int64]:
        """The memory profile if the second or later run at `row` were taken out."""
        inst, o = self.instance, self.rows[row]
        memory = self.memory.copy()
        own = inst.workspace[o]
        for v in inst.makes[o]:
            size = inst.size[v]
            own += size
            if inst.held[v]:
                continue
            end = self.hold_end(v, row)
            if end > row:
                before = self.hold_end(v, row - 1)
                memory[before + 1 : row] += size
                own -= size
            # else: nobody reads this copy; it is there only while the row runs
        for v in self._reads(o, False):
            if inst.held[v]:
                continue
            if self.hold_end(v, row - 1) == row:
                read = self.read[v]
                k = bisect_left(read, row)
                made = self.made.get(v, [])
                m = bisect_left(made, row)
                start = made[m - 1] if m else -1
                before = max(read[k - 1] if k else -1, start)
                memory[before + 1 : row] -= inst.size[v]
                own += inst.size[v]
        memory[row] -= own
        return memory

    def remove(self, row: int, memory: NDArray[np.int64]) -> None:
        """Takes out the run at `row`; `memory` is what `without(row)` gave."""
        o = self.rows[row]
        for v in self._reads(o, False):
            self.read[v].remove(row)
        for v in self.instance.makes[o]:
            self.made[v].remove(row)
        self.rows[row] = -1
        self.memory = memory

    def held_before(self, row: int) -> int:
        """Bytes held right before `row` runs."""
        inst, o = self.instance, self.rows[row]
        if o < 0:
            return int(self.memory[row])
        made = self._writes(o, self.first[o] == row)
        return int(self.memory[row]) - inst.workspace[o] - sum(inst.size[v] for v in made)

    def is_held(self, v: int, row: int) -> bool:
        """Whether a copy of `v` made before `row` is read at or after it."""
        return self.hold_end(v, row - 1) >= row

    def with_runs(self, at: int, ops: Sequence[int]) -> NDArray[np.int64]:
        """The memory profile if `ops` ran again right before row `at`."""
        inst, k = self.instance, len(ops)
        memory = np.empty(len(self.memory) + k, dtype=np.int64)
        memory[:at] = self.memory[:at]
        memory[at + k :] = self.memory[at:]
        memory[at : at + k] = self.held_before(at)
        events: dict[int, list[tuple[int, bool]]] = {}
        for j, o in enumerate(ops):
            own = inst.workspace[o]
            for v in self._reads(o, False):
                events.setdefault(v, []).append((at + j, False))
            for v in inst.makes[o]:
                if inst.held[v]:
                    own += inst.size[v]
                else:
                    events.setdefault(v, []).append((at + j, True))
            memory[at + j] += own
        for v, inside in events.items():
            if not inst.held[v]:
                self._replay(memory, v, at, k, inside)
        return memory

    def _replay(
        self, memory: NDArray[np.int64], v: int, at: int, k: int, inside: list[tuple[int, bool]]
    ) -> None:
        """Replaces the copy of `v` in use before `at` by the copies that `inside` makes of it."""
        size = self.instance.size[v]
        made = self.made.get(v, [])
        start = made[bisect_left(made, at) - 1]
        end = self.hold_end(v, at - 1)
        later = end + k if end >= at else -1
        memory[start : max(end, later) + 1] -= size
        stop = end if end < at else self.last_event(v, at)
        for row, is_make in inside:
            if is_make:
                memory[start : stop + 1] += size
                start = row
            stop = row
        memory[start : max(stop, later) + 1] += size

    def last_event(self, v: int, at: int) -> int:
        """Last row before `at` that makes or reads `v`."""
        made, read = self.made.get(v, []), self.read.get(v, [])
        m, r = bisect_left(made, at), bisect_left(read, at)
        return max(made[m - 1] if m else -1, read[r - 1] if r else -1)

    def next_read(self, v: int, row: int) -> int:
        """First row from `row` on that reads the copy of `v` held there."""
        read = self.read[v]
        return read[bisect_left(read, row)]

    def insert(self, at: int, ops: Sequence[int], memory: NDArray[np.int64]) -> None:
        """Runs `ops` again right before row `at`; `memory` is what `with_runs` gave."""
        k = len(ops)
        for events in (*self.made.values(), *self.read.values()):
            if events and events[-1] >= at:
                i = bisect_left(events, at)
                events[i:] = [row + k for row in events[i:]]
        self.first = {o: row + k if row >= at else row for o, row in self.first.items()}
        self.rows[at:at] = ops
        self.memory = memory
        for row, o in enumerate(ops, at):
            for v in self.instance.makes[o]:
                insort(self.made[v], row)
            for v in self._reads(o, False):
                insort(self.read.setdefault(v, []), row)

    def copy(self) -> Timeline:
        """A copy that shares nothing that edits change."""
        other = Timeline.__new__(Timeline)
        other.instance = self.instance
        other.rows, other.memory = self.rows[:], self.memory
        other.made = {v: rows[:] for v, rows in self.made.items()}
        other.read = {v: rows[:] for v, rows in self.read.items()}
        other.first = dict(self.first)
        return other
