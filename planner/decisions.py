"""What an order of operations means in the columns of a staged program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from planner.instance import Instance
from planner.staged_program import StagedProgram
from planner.timeline import Timeline


def decisions(instance: Instance, staged: StagedProgram, order: Sequence[int]) -> dict[int, float]:
    """Values of the columns `held` and `again` that describe an order, as well as they can.

    The program may have no column for something that the order does; then the values break a row.
    """
    line = Timeline(instance, order)
    rows = [_row(line, order, *moment) for moment in staged.moments]
    values: dict[int, float] = {}
    for (_, o), row, columns in zip(staged.moments, rows, staged.held, strict=True):
        runs = o if row < len(order) and order[row] == o else -1
        touched = {*instance.reads[runs], *instance.makes[runs]} if runs >= 0 else set()
        for v, column in columns.items():
            held = v in touched or line.is_held(v, row)
            values[column] = max(values.get(column, 0.0), float(held))
    starts = [0, *(row + (order[row] == m[1]) for row, m in zip(rows, staged.moments, strict=True))]
    for i, columns in enumerate(staged.again):
        end = starts[i + 1] if i + 1 < len(starts) else len(order)
        ran = {o for row, o in enumerate(order[starts[i] : end], starts[i]) if line.first[o] != row}
        values |= {column: float(o in ran) for o, column in columns.items()}
    return values


def _row(line: Timeline, order: Sequence[int], t: int, o: int) -> int:
    """The row of a moment: that of its run if it happens, else the one before which it would."""
    if o == t:
        return line.first[t]
    start = line.first[t - 1] + 1 if t else 0
    slot = order[start : line.first[t]]
    if o < 0:
        return start
    last = max((i for i, op in enumerate(slot) if op == o), default=-1)
    return start + (last if last >= 0 else bisect_left(slot, o + 1))
