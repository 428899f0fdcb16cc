"""Baselines that people know, for comparison: nothing, every block, square root of the blocks.

`per_block` is what a `torch.utils.checkpoint` around every block does, `sqrt` Chen's rule
(1604.06174) on the same blocks: keep every k-th value between blocks, k the root of their number.
Both make again only what backward reads, which flatters them a little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.blocks import split
from planner.instance import Instance
from planner.minimum import infeasible
from planner.orders import lazy_order
from planner.problem import Problem, Solution
from runtime.schedule import save_all_order

SHORTEST = 6  # least operations of a block


def save_all(problem: Problem, *, time_limit: float) -> Solution:
    """Recomputes nothing: optimal if it fits."""
    del time_limit
    instance = Instance(problem)
    order = save_all_order(problem.graph)
    if instance.dropped or instance.peak(order) > problem.budget_bytes:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(order, problem.graph.time_ns, exact=True)


def per_block(problem: Problem, *, time_limit: float) -> Solution:
    """Keeps the value between any two blocks."""
    del time_limit
    return _keeping_every(problem, 1)


def sqrt(problem: Problem, *, time_limit: float) -> Solution:
    """Groups n blocks by the root of n and keeps the values between groups."""
    del time_limit
    blocks = len(split(Instance(problem), SHORTEST).blocks)
    return _keeping_every(problem, max(1, round(math.sqrt(blocks))))


def _keeping_every(problem: Problem, group: int) -> Solution:
    instance = Instance(problem)
    chain = split(instance, SHORTEST)
    between: Sequence[int] = [block.target for block in chain.blocks[:-1]]
    saved = {*chain.persistent, *between[group - 1 :: group]} - instance.dropped
    order = lazy_order(instance, saved)
    if instance.peak(order) > problem.budget_bytes:
        raise infeasible(instance, problem.budget_bytes)
    return Solution(tuple(order))
