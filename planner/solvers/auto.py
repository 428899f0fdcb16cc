"""The solver that people get: tries the others and keeps the best, with the best bound."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from planner.anneal import anneal
from planner.bounds import lower_bound
from planner.closing import Closing
from planner.eviction import OutOfMemory, greedy_order
from planner.instance import Instance
from planner.linear import ProgramError
from planner.minimum import infeasible, least_peak
from planner.oracle import TINY, TooLarge
from planner.problem import Problem, Solution
from planner.search import improve_order, reduce_order
from planner.solvers import exhaustive, staged
from planner.solvers.chain import chain_order
from planner.solvers.staged import Found
from runtime.schedule import save_all_order

CLOSE = 1e-3  # gap, as a fraction of the step, that needs no second opinion
WIDE = 2e-2  # gap at which it is worth while to solve the chain
TRIES = 100_000  # exchanges tried on the best order, times its length
SHAKES = 1_000_000  # random ones, where the gap is more than APART
APART = 5e-3
PATIENCE = 0.02  # seconds for each operation: small models shall not wait for the last percent
EARLY, LATER = (1, 2), (4, 6, 8, 10, 12)  # moments of the integer programs
SHARES = (0.45, 0.55, 0.65, 0.75)  # of the time limit, at which the parts of the work must end


def solve(problem: Problem, *, time_limit: float) -> Solution:
    """Nothing to do if all fits; else the staged program, and where that leaves a gap the others.

    The work is bounded by counts, so that every process finds the same plan, unless the time limit
    comes first: then the best plan so far is returned.
    """
    with _no_collection():
        return _solve(problem, time_limit)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stops Python's cycle collector: nothing here makes cycles, and its passes over the many lists
    of the search took up to half of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _solve(problem: Problem, time_limit: float) -> Solution:
    start = time.monotonic()
    instance = Instance(problem)
    nothing = save_all_order(problem.graph)
    if not instance.dropped and instance.peak(nothing) <= problem.budget_bytes:
        return Solution(nothing, problem.graph.time_ns, exact=True, winner="save_all")
    least, least_order = least_peak(instance)
    if problem.budget_bytes < least:
        raise infeasible(instance, problem.budget_bytes)
    if instance.count <= TINY:
        with suppress(TooLarge):
            return exhaustive.solve(problem, time_limit=time_limit)
    return _combined(instance, least_order, start, time_limit)


def _combined(
    instance: Instance, least_order: tuple[int, ...], start: float, time_limit: float
) -> Solution:
    ends = [start + share * time_limit for share in SHARES]
    found = staged.search(instance, end=ends[0])
    try:
        bound = lower_bound(instance, instance.budget, found.binding, ends[1])
    except ProgramError as error:
        raise infeasible(instance, instance.budget) from error
    orders = {"staged": found.order} if found.order else {}
    step = instance.graph.time_ns
    if not found.order or found.time_ns > bound + CLOSE * step:
        orders |= dict(_simple(instance, least_order, ends[2]))
    best = min(map(instance.time_of, orders.values()))
    if best > bound + WIDE * step:
        chained = chain_order(instance, instance.budget, ends[2])
        orders |= {} if chained is None else {"chain": tuple(chained)}
    name, order = min(orders.items(), key=lambda pair: instance.time_of(pair[1]))
    goal = bound + int(CLOSE * step)
    if instance.time_of(order) > goal:
        order = tuple(improve_order(instance, order, TRIES, start + time_limit))
        closing = Closing(instance, Found(order, instance.time_of(order), found.binding), bound)
        name, order = _closed(closing, name, ends[3], start + time_limit)
        bound = closing.bound
    spent = instance.time_of(order)
    return Solution(order, min(bound, spent), bound >= spent, name)


def _closed(closing: Closing, name: str, early: float, end: float) -> tuple[str, tuple[int, ...]]:
    """Small integer programs; then, at one time, larger ones for the bound and random exchanges."""
    instance, step = closing.instance, closing.instance.graph.time_ns
    closing.run(EARLY, early)
    if closing.found.time_ns <= closing.bound + APART * step:
        return name, closing.found.order
    order, goal = closing.found.order, closing.bound + int(CLOSE * step)
    end = min(end, time.monotonic() + instance.count * PATIENCE)
    with ThreadPoolExecutor(1) as other:  # HiGHS runs without Python's lock
        larger = other.submit(closing.run, LATER, end)
        shaken = tuple(anneal(instance, order, SHAKES, goal, end))
        larger.result()
    if instance.time_of(shaken) < closing.found.time_ns:
        return name, shaken
    return "integer", closing.found.order


def _simple(
    instance: Instance, least_order: tuple[int, ...], end: float
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Orders within the budget by simple rules; the one of least peak always is."""
    budget = instance.budget
    yield "least peak", tuple(reduce_order(instance, least_order, budget, end))
    for fresh in (1, 8, 32):
        if time.monotonic() > end:
            return
        try:
            order = greedy_order(instance, budget, fresh)
        except OutOfMemory:
            continue
        if instance.peak(order) <= budget:
            yield f"greedy {fresh}", tuple(reduce_order(instance, order, budget, end))
