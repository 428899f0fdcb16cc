"""Simulated annealing on orders: leaves the local optima in which `planner.search` ends."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from planner.instance import Instance
from planner.search import Noise, exchanged, reduce_line
from planner.timeline import Timeline

LENGTHS = (1, 2, 3, 5, 8, 13, 20)  # of random stretches
WARM = 1e-3  # of the step: what an exchange may cost
MOST = 1_500  # exchanges
EMPTY = 1.5  # rows for each run at which empty rows are taken out
PATIENCE = 60  # exchanges without success after which the search returns to its best


def anneal(
    instance: Instance, order: Sequence[int], work: int, goal: int, end: float = math.inf
) -> list[int]:
    """Simulated annealing with the same exchanges: stretches at random, repaired at random.

    An exchange is accepted if it costs at most a random part of `WARM` of the step, so that the
    search can leave a local optimum. The random numbers are the same in every run. It stops after
    `work` exchanges, times the length of the order (at most `MOST`), at a time of `goal`,
    or at `end`.
    """
    noise = random.Random(0)
    line = Timeline(instance, order)
    reduce_line(line, instance.budget)
    best = line
    now = least = instance.time_of(line.order)
    since = 0
    for _ in range(min(MOST, work // max(1, len(order)))):
        again = line.again()
        if not again or least <= goal or time.monotonic() > end:
            break
        other = exchanged(line, _random_stretch(line, again, noise), end, noise)
        since += 1
        if other is not None:
            spent = instance.time_of(other.order)
            if spent <= now + WARM * instance.graph.time_ns * noise.random():
                line, now = _compact(other), spent
            if spent < least:
                best, least, since = other, spent, 0
        if since > PATIENCE:
            line, now, since = Timeline(instance, best.order), least, 0
    return best.order


def _compact(line: Timeline) -> Timeline:
    """The line, without its empty rows once they are many."""
    order = line.order
    return line if len(line.rows) < EMPTY * len(order) else Timeline(line.instance, order)


def _random_stretch(line: Timeline, again: Sequence[int], noise: Noise) -> list[int]:
    """Rows of second runs that follow each other, or that run operations near each other."""
    length, i = noise.choice(LENGTHS), noise.randrange(len(again))
    if noise.random() < 0.5:
        return list(again[i : i + length])
    centre = line.rows[again[i]]
    return sorted(sorted(again, key=lambda row: (abs(line.rows[row] - centre), row))[:length])
