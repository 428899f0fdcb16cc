"""Local search on orders, judged by the simulator's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from planner.instance import Instance
from planner.timeline import Timeline


def reduce_order(instance: Instance, order: Sequence[int], budget: int) -> list[int]:
    """Takes out second runs, the most expensive first, as long as the peak stays in the budget."""
    line = Timeline(instance, order)
    while True:
        rows = sorted(line.again(), key=lambda r: (-instance.time[line.rows[r]], r))
        removed = False
        for row in rows:
            memory = line.without(row)
            if memory.max() <= budget and not _saves_dropped(line, row):
                line.remove(row, memory)
                removed = True
        if not removed:
            return line.order


def _saves_dropped(line: Timeline, row: int) -> bool:
    """Whether the run makes a value that must not be held at the boundary."""
    inst = line.instance
    return bool(inst.dropped) and not inst.dropped.isdisjoint(inst.makes[line.rows[row]])
