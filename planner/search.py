"""Local search on orders, priced by `Timeline`: take runs out, put evictions in."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.instance import Instance
from planner.timeline import Timeline

LONGEST_CHAIN = 60  # runs that one eviction may cost
TRIED = 24  # evictions priced exactly at each step


def reduce_order(instance: Instance, order: Sequence[int], budget: int) -> list[int]:
    """Takes out second runs, the most expensive first, as long as the peak stays in the budget."""
    line = Timeline(instance, order)
    reduce_line(line, budget)
    return line.order


def reduce_line(line: Timeline, budget: int) -> None:
    """`reduce_order` in place."""
    time = line.instance.time
    while True:
        removed = False
        for row in sorted(line.again(), key=lambda r: (-time[line.rows[r]], r)):
            memory = line.without(row)
            if memory.max() <= budget and not _saves_dropped(line, row):
                line.remove(row, memory)
                removed = True
        if not removed:
            return


def _saves_dropped(line: Timeline, row: int) -> bool:
    """Whether the run makes a value that must not be held at the boundary."""
    inst = line.instance
    return bool(inst.dropped) and not inst.dropped.isdisjoint(inst.makes[line.rows[row]])


@dataclass(frozen=True)
class Eviction:
    """Let go of a value before a row and make it again right before the row that reads it."""

    value: int
    at: int
    ops: tuple[int, ...]
    time: int


class Stuck(Exception):
    """No eviction at the peak helps."""


def repair_order(
    instance: Instance, order: Sequence[int], budget: int, most: int = 600
) -> list[int] | None:
    """Evicts values at the peak until the order fits, in `most` steps; None if it gets stuck."""
    line = Timeline(instance, order)
    try:
        repair_line(line, budget, most)
    except Stuck:
        return None
    return line.order


def repair_line(line: Timeline, budget: int, steps: int, end: float = math.inf) -> None:
    """Evicts values at the peak until the line fits, in at most `steps` steps.

    Each step takes, of the evictions at the worst row, the one that removes most bytes over the
    budget (summed over all rows) for its time.

    Raises:
        Stuck: it cannot be made to fit in this way, or not before `end` (monotonic clock).
    """
    excess = _excess(line.memory, budget)
    for _ in range(steps):
        if excess == 0:
            return
        if time.monotonic() > end:
            break
        best: tuple[Eviction, NDArray[np.int64]] | None = None
        least, after = 0.0, 0
        for eviction in evictions(line, int(line.memory.argmax()))[:TRIED]:
            memory = line.with_runs(eviction.at, eviction.ops)
            left = _excess(memory, budget)
            rank = (excess - left) / (eviction.time + 1)
            if rank > least:
                best, least, after = (eviction, memory), rank, left
        if best is None:
            raise Stuck
        line.insert(best[0].at, best[0].ops, best[1])
        excess = after
    raise Stuck


def improve_order(
    instance: Instance, order: Sequence[int], work: int, end: float = math.inf
) -> list[int]:
    """Takes out one second run at a time, evicts something else for it, keeps what is faster.

    `work` bounds the number of exchanges tried, times the length of the order; expensive runs come
    first. It stops at `end`, in seconds of the monotonic clock.
    """
    budget = instance.budget
    line = Timeline(instance, order)
    reduce_line(line, budget)
    tries = max(4, work // max(1, len(order)))
    best = instance.time_of(line.order)
    failed: set[int] = set()
    while tries > 0 and time.monotonic() < end:
        again = [row for row in line.again() if line.rows[row] not in failed]
        if not again:
            break
        row = max(again, key=lambda r: (instance.time[line.rows[r]], -r))
        o, tries = line.rows[row], tries - 1
        other = _without(line, row, budget)
        spent = best if other is None else instance.time_of(other.order)
        if other is None or spent >= best:
            failed.add(o)
        else:
            line, best = other, spent
            failed.clear()
    return line.order


def _without(line: Timeline, row: int, budget: int) -> Timeline | None:
    """A line within the budget in which the run at `row` was taken out, if repair finds one."""
    if _saves_dropped(line, row):
        return None
    other = line.copy()
    other.remove(row, other.without(row))
    try:
        repair_line(other, budget, 40)
    except Stuck:
        return None
    reduce_line(other, budget)
    return other


def _excess(memory: NDArray[np.int64], budget: int) -> int:
    return int(np.maximum(memory - budget, 0).sum())


def evictions(line: Timeline, row: int) -> list[Eviction]:
    """Values held but not used at a row that can be made again, best bytes for time first."""
    inst = line.instance
    o = line.rows[row]
    used = {*inst.reads[o], *inst.makes[o]} if o >= 0 else set()
    found = []
    for v in line.made:
        p = inst.producer[v]
        if inst.held[v] or v in used or not 0 <= p < inst.boundary or not inst.again[p]:
            continue
        if v == inst.state[p] or not line.is_held(v, row):
            continue
        at = line.next_read(v, row)
        ops = _chain(line, v, at, row)
        if ops:
            found.append(Eviction(v, at, ops, sum(inst.time[c] for c in ops)))
    size = inst.size
    found.sort(key=lambda e: (-size[e.value] / (e.time + 1), e.value))
    return found


def _chain(line: Timeline, v: int, at: int, row: int) -> tuple[int, ...]:
    """Operations that make `v` again at row `at`; empty if there are too many.

    Inputs that are held over both rows anyway are read; the others are made again too, as far as
    they can be.
    """
    inst = line.instance
    need = {inst.producer[v]}
    stack = [inst.producer[v]]
    while stack:
        o = stack.pop()
        for u in inst.reads[o]:
            p = inst.producer[u]
            if p in need or not inst.again[p] or inst.held[u]:
                continue
            if u != v and line.is_held(u, at):
                continue
            need.add(p)
            stack.append(p)
            if len(need) > LONGEST_CHAIN:
                return ()
    return tuple(sorted(need))
