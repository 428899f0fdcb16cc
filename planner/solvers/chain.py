"""Dynamic program over a chain of blocks with options, in numpy over memory levels.

The recurrence is rotor's (Beaumont et al., hal-02352969) with Rockmate's options. Opt[a, b][m] is
the least added time to run blocks a..b forward and backward with m levels of memory, the source of
a being held already. Either block a is run once and one of its options is kept,

    time_k + Opt[a + 1, b][m - saved_k - target_a],

or it is fast-forwarded to the source of some block j, which alone is kept, and run again later:

    time of forward a..j-1 + Opt[j, b][m - source_j] + Opt[a, j - 1][m - gradients of j..b].

Intervals that hold the same kinds of blocks share one entry, so that a thousand equal layers are
solved once. Exact among memory-persistent schedules of these blocks and options, up to the rounding
of sizes to levels, which goes up. The order is then priced exactly and polished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.blocks import Block, Chain, split
from planner.instance import Instance
from planner.minimum import infeasible
from planner.options import Option, block_options
from planner.problem import Problem, Solution
from planner.search import reduce_order, repair_order

_LEVELS = 500
_EXACT = 1500  # levels up to which bytes are not rounded, if they have a common divisor
_TRIES = 5
# Least operations of a block. Short blocks can be combined freely, but save the value between any
# two of them; long ones choose inside. Neither is better everywhere, so both are tried.
_SHORTEST = (6, 24, 80)
_FEW = 8  # kinds of shortest blocks at which those are tried too: nothing inside to choose from
_SPLIT = 1_000_000  # choices from here on are fast-forwards, below options

Array = NDArray[np.float64]


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """The chain's order; its work is bounded by the graph's size and by `time_limit`."""
    instance = Instance(problem)
    order = chain_order(instance, problem.budget_bytes, time.monotonic() + time_limit)
    if order is None:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(tuple(order), winner="chain")


def chain_order(instance: Instance, budget: int, end: float = math.inf) -> list[int] | None:
    """An order within the budget, or None if the chain has none by `end` (monotonic clock)."""
    found: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    finest = split(instance, 1)
    uniform = len({x.kind for x in finest.blocks}) <= _FEW
    for shortest in (1, *_SHORTEST) if uniform else _SHORTEST:
        chain = finest if shortest == 1 else split(instance, shortest)
        shape = tuple(len(x.forward) for x in chain.blocks)
        if shape not in seen and time.monotonic() <= end:
            seen.add(shape)
            with suppress(_Late):
                found += _orders(Prepared(instance, chain, end=end), budget, end)
    if not found and not uniform:  # the least memory needs a cut wherever there can be one
        with suppress(_Late):
            found += _orders(Prepared(instance, finest, end=end), budget, end)
    return min(found, key=instance.time_of, default=None)


def _orders(chain: Prepared, budget: int, end: float) -> Iterator[list[int]]:
    """Orders within the budget: the table's memory is lowered by what its order has too much."""
    instance, target = chain.instance, budget
    for number in range(_TRIES):
        if number and time.monotonic() > end:
            return
        order = _Table(chain, target, end).order()
        if order is None:
            return
        peak = instance.peak(order)
        fitting = order if peak <= budget else repair_order(instance, order, budget)
        if fitting is not None and instance.obeys(fitting):
            yield reduce_order(instance, fitting, budget)
        if peak <= budget:
            return
        target -= peak - budget


def table_order(chain: Prepared, budget: int) -> list[int] | None:
    """The order that the table of one budget describes, by its model of memory; None if none."""
    return _Table(chain, budget).order()


Choose = Callable[[tuple[Option, ...], Block], tuple[Option, ...]]


class _Late(Exception):
    """The time is up."""


class Prepared:
    """A chain with what its table needs, the same for every budget.

    Attributes:
        options: for each block.
        forward_time, forward_peak: of running it forward and keeping only its target.
        needed: how many of its forward operations its own backward can need; the rest only makes
            its target, which nobody needs when it runs again as the last block of an interval.
        spared: time of that rest.
        gradients: bytes that its backward leaves behind.
        incoming: bytes that later blocks' backward hands to its own: they are held while the block
            is run forward again.
        unit: greatest common divisor of all these bytes.
        fixed: bytes held beside the chain during the whole step.

    `choose` may leave some options of a block out.
    """

    def __init__(
        self,
        instance: Instance,
        chain: Chain,
        choose: Choose | None = None,
        end: float = math.inf,
    ) -> None:
        self.instance = instance
        self.blocks = chain.blocks
        outside = set(chain.persistent) | _held_anyway(instance)
        by_kind: dict[int, tuple[Option, ...]] = {}
        for block in chain.blocks:
            if block.kind not in by_kind:
                if time.monotonic() > end:
                    raise _Late
                options = block_options(instance, block, outside)
                by_kind[block.kind] = choose(options, block) if choose else options
        self.options = [by_kind[x.kind] for x in chain.blocks]
        self.forward_time = [
            sum(instance.time[o] for o in x.forward if instance.again[o]) for x in chain.blocks
        ]
        self.needed = [_needed(instance, x) for x in chain.blocks]
        self.spared = [
            sum(instance.time[o] for o in x.forward[n:] if instance.again[o])
            for x, n in zip(chain.blocks, self.needed, strict=True)
        ]
        self.forward_peak = [min(k.forward_peak for k in ks) for ks in self.options]
        self.source = [0 if x.source < 0 else instance.size[x.source] for x in chain.blocks]
        self.gradients = [_left_behind(instance, x) for x in chain.blocks]
        self.incoming = [_incoming(instance, x) for x in chain.blocks]
        self.unit = self._common_divisor()
        self.fixed = instance.fixed + sum(instance.size[v] for v in outside)

    def _common_divisor(self) -> int:
        """Of all bytes that the table counts."""
        sizes = {*self.source, *self.gradients, *self.incoming, *self.forward_peak}
        for options in self.options:
            for k in options:
                sizes |= {k.saved, k.forward_peak, k.backward_peak}
        return max(1, math.gcd(*sizes))


def prepare(instance: Instance, shortest: int) -> Prepared:
    """Blocks and options of a step."""
    return Prepared(instance, split(instance, shortest))


def _held_anyway(instance: Instance) -> set[int]:
    """Forward values that stay: the caller's outputs, and what cannot be made again."""
    return {
        v
        for v, o in enumerate(instance.producer)
        if 0 <= o < instance.boundary
        and v != instance.state[o]
        and (instance.held[v] or not instance.again[o])
    }


def _left_behind(instance: Instance, block: Block) -> int:
    if instance.graph.accumulate:
        return 0
    made = (v for t in block.backward for v in instance.makes[t])
    return sum(instance.size[v] for v in made if instance.held[v])


def _needed(instance: Instance, block: Block) -> int:
    read = {v for t in block.backward for v in instance.reads[t]}
    useful = [i for i, o in enumerate(block.forward, 1) if read.intersection(instance.makes[o])]
    return max(useful, default=0)


def _incoming(instance: Instance, block: Block) -> int:
    inside = set(block.backward)
    read = {v for t in block.backward for v in instance.reads[t] if not instance.held[v]}
    made_later = (v for v in read if instance.producer[v] >= instance.boundary)
    return sum(instance.size[v] for v in made_later if instance.producer[v] not in inside)


class _Table:
    """The table for one budget. Intervals are computed from short to long, each content once."""

    def __init__(self, chain: Prepared, budget: int, end: float = math.inf) -> None:
        self.chain = chain
        self.end = end
        self.memory = budget - chain.fixed
        exact = self.memory // chain.unit
        self.most = exact if 0 < exact <= _EXACT else _LEVELS
        self.count = len(chain.blocks)
        self.left = [0, *accumulate(chain.gradients)]
        self.cost: dict[int, Array] = {}
        self.choice: dict[int, NDArray[np.int32]] = {}
        self.names: dict[tuple[int, int], int] = {}
        self.interned: dict[tuple[int, int], int] = {}

    def levels(self, nbytes: int) -> int:
        """Bytes in levels, rounded up."""
        if self.most != _LEVELS:
            return -(-nbytes // self.chain.unit)
        return -(-nbytes * _LEVELS // self.memory)

    def order(self) -> list[int] | None:
        """The order for the whole chain, or None if it does not fit."""
        if self.memory <= 0:
            return None
        for length in range(1, self.count + 1):
            if time.monotonic() > self.end:
                raise _Late
            names = [self._name(a, a + length - 1) for a in range(self.count - length + 1)]
            for a, name in enumerate(names):
                if name not in self.cost:
                    self.cost[name], self.choice[name] = self._best(a, a + length - 1)
        if not np.isfinite(self.cost[self._name(0, self.count - 1)][self.most]):
            return None
        order: list[int] = []
        self._emit(order, 0, self.count - 1, self.most, first=True)
        return order

    def _name(self, a: int, b: int) -> int:
        """Number of an interval's content."""
        key = (a, b)
        found = self.interned.get(key)
        if found is None:
            kind = self.chain.blocks[b].kind
            content = (-1 if a == b else self._name(a, b - 1), kind)
            found = self.names.setdefault(content, len(self.names))
            self.interned[key] = found
        return found

    def _best(self, a: int, b: int) -> tuple[Array, NDArray[np.int32]]:
        cost = np.full(self.most + 1, np.inf)
        choice = np.full(self.most + 1, -1, dtype=np.int32)
        for number, option in enumerate(self.chain.options[a]):
            _take(cost, choice, self._keep(a, b, option), number)
        incoming = self.chain.incoming[b]
        forward, peak = 0, 0
        for j in range(a + 1, b + 1):
            forward += self.chain.forward_time[j - 1]
            carried = self.chain.source[j - 1] if j - 1 > a else 0
            peak = max(peak, self.chain.forward_peak[j - 1] + carried)
            rest = self.cost[self._name(j, b)]
            again = self.cost[self._name(a, j - 1)]
            spent = forward - self.chain.spared[j - 1]
            total = spent + _less(rest, self.levels(self.chain.source[j]))
            total = total + _less(again, self.levels(self._gradients(j, b)))
            total[: self.levels(peak + incoming)] = np.inf
            _take(cost, choice, total, _SPLIT + j - a)
        return cost, choice

    def _keep(self, a: int, b: int, option: Option) -> Array:
        """Costs of keeping an option of block a."""
        if a == b:
            total = np.full(self.most + 1, float(option.time))
        else:
            held = self.levels(option.saved) + self.levels(self.chain.source[a + 1])
            total = option.time + _less(self.cost[self._name(a + 1, b)], held)
        backward = option.backward_peak + self._gradients(a + 1, b)
        forward = option.forward_peak + self.chain.incoming[b]
        total[: self.levels(max(forward, backward))] = np.inf
        return total

    def _gradients(self, a: int, b: int) -> int:
        return self.left[b + 1] - self.left[a]

    def _emit(self, order: list[int], a: int, b: int, m: int, *, first: bool) -> None:
        """Appends the operations of an interval; loops where recursion would go a block deeper."""
        tails: list[tuple[Block, Option]] = []
        while a <= b:
            choice = int(self.choice[self._name(a, b)][m])
            block = self.chain.blocks[a]
            if choice >= _SPLIT:
                j = a + choice - _SPLIT
                for i in range(a, j):
                    order += self._forward(i, first)
                self._emit(order, j, b, m - self.levels(self.chain.source[j]), first=first)
                m -= self.levels(self._gradients(j, b))
                b, first = j - 1, False
                continue
            option = self.chain.options[a][choice]
            order += self._forward(a, first, last=a == b)
            tails.append((block, option))
            if a < b:
                m -= self.levels(option.saved) + self.levels(self.chain.source[a + 1])
            a += 1
        for block, option in reversed(tails):
            ops = (*block.forward, *block.backward)
            order += [ops[i] for i in option.tail]

    def _forward(self, a: int, first: bool, *, last: bool = False) -> Sequence[int]:
        """Forward operations of a block; `last`: nobody but its backward needs what they make."""
        ops = self.chain.blocks[a].forward
        if first:
            return ops
        useful = ops[: self.chain.needed[a]] if last else ops
        return [o for o in useful if self.chain.instance.again[o]]


def _take(cost: Array, choice: NDArray[np.int32], total: Array, number: int) -> None:
    better = total < cost
    cost[better] = total[better]
    choice[better] = number


def _less(cost: Array, levels: int) -> Array:
    """The costs with that many levels fewer."""
    result = np.full(len(cost), np.inf)
    if levels < len(cost):
        result[levels:] = cost[: len(cost) - levels]
    return result
