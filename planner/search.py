"""Local search on orders, priced by `Timeline`: take runs out, put evictions in."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.instance import Instance
from planner.timeline import Timeline

LONGEST_CHAIN = 60  # runs that one eviction may cost
PROMISING = 40  # evictions looked at in each step
TRIED = 8  # of them priced exactly
STRETCHES = (1, 3, 8, 20)  # runs that follow each other and are taken out together
EXCHANGED = 40  # evictions for one stretch
SHUFFLE = 0.5  # spread of the logarithm of ranks that are shuffled

Noise = random.Random


def reduce_order(
    instance: Instance, order: Sequence[int], budget: int, end: float = math.inf
) -> list[int]:
    """Takes out second runs, the most expensive first, as long as the peak stays in the budget.

    It stops at `end`, in seconds of the monotonic clock.
    """
    line = Timeline(instance, order)
    reduce_line(line, budget, end)
    return line.order


def reduce_line(line: Timeline, budget: int, end: float = math.inf) -> None:
    """`reduce_order` in place."""
    times = line.instance.time
    while True:
        removed = False
        for row in sorted(line.again(), key=lambda r: (-times[line.rows[r]], r)):
            memory = line.without(row)
            if memory.max() <= budget and not _saves_dropped(line, row):
                line.remove(row, memory)
                removed = True
        if not removed or time.monotonic() > end:
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


def repair_line(
    line: Timeline, budget: int, steps: int, end: float = math.inf, noise: Noise | None = None
) -> None:
    """Evicts values at the peak until the line fits, in at most `steps` steps.

    Each step takes, of the evictions at the worst row, the one that removes most bytes over the
    budget (summed over all rows) for its time; `noise` shuffles the ranks a little.

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
        for eviction in evictions(line, int(line.memory.argmax()), budget)[:TRIED]:
            memory = line.with_runs(eviction.at, eviction.ops)
            left = _excess(memory, budget)
            rank = (excess - left) / (eviction.time + 1)
            if noise is not None:
                rank *= math.exp(noise.gauss(0.0, SHUFFLE))
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
    """Takes out second runs, evicts something else for them, keeps what is faster.

    First one run at a time, the most expensive first, then stretches of several that follow each
    other. `work` bounds the number of exchanges tried, times the length of the order. It stops at
    `end`, in seconds of the monotonic clock.
    """
    line = Timeline(instance, order)
    reduce_line(line, instance.budget)
    tries = max(4, work // max(1, len(order)))
    for length in STRETCHES:
        line, tries = _exchange(line, length, tries, end)
    return line.order


def _exchange(line: Timeline, length: int, tries: int, end: float) -> tuple[Timeline, int]:
    """Exchanges stretches of `length` second runs until all fail: (line, tries left)."""
    instance = line.instance
    best = instance.time_of(line.order)
    failed: set[tuple[int, ...]] = set()
    while tries > 0 and time.monotonic() < end:
        stretch = _next_stretch(line, length, failed)
        if not stretch:
            break
        tries -= 1
        other = exchanged(line, stretch, end)
        spent = best if other is None else instance.time_of(other.order)
        if other is None or spent >= best:
            failed.add(tuple(line.rows[row] for row in stretch))
        else:
            line, best = other, spent
    return line, tries


def _next_stretch(line: Timeline, length: int, failed: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The rows of the most expensive stretch that has not failed before; () if all have."""
    times, rows, again = line.instance.time, line.rows, line.again()
    step = max(1, length // 2)
    stretches = [tuple(again[i : i + length]) for i in range(0, len(again), step)]
    left = [s for s in stretches if tuple(rows[row] for row in s) not in failed]
    return max(left, key=lambda s: (sum(times[rows[row]] for row in s), -s[0]), default=())


def exchanged(
    line: Timeline, stretch: Sequence[int], end: float, noise: Noise | None = None
) -> Timeline | None:
    """A line within the budget in which these runs were taken out, if repair finds one."""
    if any(_saves_dropped(line, row) for row in stretch):
        return None
    other = line.copy()
    for row in stretch:
        other.remove(row, other.without(row))
    try:
        repair_line(other, line.instance.budget, EXCHANGED, end, noise)
    except Stuck:
        return None
    reduce_line(other, line.instance.budget)
    return other


def _excess(memory: NDArray[np.int64], budget: int) -> int:
    return int(np.maximum(memory - budget, 0).sum())


def evictions(line: Timeline, row: int, budget: int) -> list[Eviction]:
    """Values held but not used at a row that can be made again, the most promising first.

    Ranked by the bytes over the budget that they take away, summed over the rows in which they are
    then not held, for the time of making them again. What making them again needs is left out here.
    """
    inst = line.instance
    over = np.maximum(line.memory - budget, 0)
    found: list[tuple[float, Eviction]] = []
    for v, last, at in _promising(line, row, over):
        ops = _chain(line, v, at, row)
        if ops:
            spent = sum(inst.time[c] for c in ops)
            gain = float(np.minimum(over[last + 1 : at], inst.size[v]).sum())
            found.append((gain / (spent + 1), Eviction(v, at, ops, spent)))
    found.sort(key=lambda pair: (-pair[0], pair[1].value))
    return [eviction for _, eviction in found]


def _promising(line: Timeline, row: int, over: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(value, last row before `row` that touches it, next row that reads it), best first."""
    inst = line.instance
    o = line.rows[row]
    used = {*inst.reads[o], *inst.makes[o]} if o >= 0 else set()
    before = np.concatenate(([0], np.cumsum(over))).tolist()
    found: list[tuple[float, int, int, int]] = []
    for v, made in line.made.items():
        read = line.read.get(v)
        if not read or read[-1] < row or made[0] >= row or not inst.evictable[v] or v in used:
            continue
        k, r = bisect_left(made, row), bisect_left(read, row)
        at = read[r]
        if k < len(made) and made[k] < at:
            continue  # made again before it is read
        last = max(made[k - 1], read[r - 1] if r else -1)
        gain = min(before[at] - before[last + 1], inst.size[v] * (at - last))
        found.append((-gain / (inst.time[inst.producer[v]] + 1), v, last, at))
    found.sort()
    return [(v, last, at) for _, v, last, at in found[:PROMISING]]


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
