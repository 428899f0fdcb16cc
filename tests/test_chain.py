"""The chain solver: blocks, and orders that certificates accept."""

from __future__ import annotations

import math

import pytest

from planner.blocks import split
from planner.bounds import solve_boundary
from planner.instance import Instance
from planner.problem import Problem
from planner.solvers import chain
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import Simulation, simulate
from tests.graphs import chain_graph, transformer_graph
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph


def price(graph: ComputationGraph, order: tuple[int, ...]) -> Simulation:
    return simulate(graph, Schedule.from_order(graph, order))


def at_fraction(graph: ComputationGraph, fraction: float) -> Problem:
    plain = price(graph, save_all_order(graph))
    return Problem(graph, plain.peak_bytes - int((1 - fraction) * plain.boundary_bytes))


def test_equal_layers_are_one_kind() -> None:
    graph = transformer_graph(12, hidden=256, seq=128, batch=2, vocabulary=1000)
    blocks = split(Instance(Problem(graph, 0)), 12).blocks
    assert len(blocks) >= 12
    assert len({b.kind for b in blocks}) <= 5
    assert [o for b in blocks for o in b.forward] == list(range(graph.boundary))
    backward = [t for b in reversed(blocks) for t in b.backward]
    assert backward == list(range(graph.boundary, len(graph.operations)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_within_budget_and_above_the_bound(accumulate: bool) -> None:
    graph = transformer_graph(
        6, hidden=256, seq=256, batch=2, vocabulary=1000, accumulate=accumulate
    )
    times = []
    for fraction in (0.8, 0.5, 0.3):
        problem = at_fraction(graph, fraction)
        found = price(graph, chain.solve(problem, time_limit=60).order)
        assert found.peak_bytes <= problem.budget_bytes
        bound = solve_boundary(Instance(problem), problem.budget_bytes).bound_ns
        assert bound <= found.time_ns
        times.append(found.time_ns)
    assert times == sorted(times)


def fewest_steps(length: int, snapshots: int) -> int:
    """Forward steps of the best reversal of a chain, the recording ones left out.

    Griewank and Walther 2000 (Revolve), theorem on the binomial schedules: r n - C(s + r, r - 1),
    where r is the least number with C(s + r, s) >= n.
    """
    repeats = 0
    while math.comb(snapshots + repeats, snapshots) < length:
        repeats += 1
    return repeats * length - (math.comb(snapshots + repeats, repeats - 1) if repeats else 0)


def test_formula_of_the_published_table() -> None:
    """Entries of the paper's formula that can be checked by hand, and its ranges."""
    assert fewest_steps(10, 3) == 15
    assert [fewest_steps(n, 1) for n in (1, 2, 3, 4)] == [0, 1, 3, 6]
    assert fewest_steps(math.comb(7, 3), 3) == 4 * 35 - math.comb(7, 3)


@pytest.mark.parametrize("snapshots", [2, 3, 4, 5])
def test_binomial_schedules(snapshots: int) -> None:
    """Equal layers in the memory of s + 2 of them: exactly the published number of steps.

    The input is a snapshot that costs nothing here; three layers' worth are a step's input, its
    output and the gradient. The first pass makes n - 1 steps that are no recomputation.
    """
    for length in (4, 7, 10, 15, 21, 30, 36):
        graph = chain_graph(length, size=10, time_ns=10)
        problem = Problem(graph, 10 * (snapshots + 2))
        found = price(graph, chain.solve(problem, time_limit=60).order)
        assert found.peak_bytes <= problem.budget_bytes
        again = fewest_steps(length, snapshots) - (length - 1)
        assert found.recompute_ns == 10 * max(0, again), length


def test_a_long_chain_in_little_memory() -> None:
    """300 layers in the memory of eleven: the published optimum, about two more runs of each."""
    graph = chain_graph(300, size=10, time_ns=10)
    instance = Instance(Problem(graph, 110))
    order = chain.table_order(chain.prepare(instance, 1), 110)
    assert order is not None
    found = price(graph, tuple(order))
    assert found.peak_bytes <= 110
    assert found.recompute_ns == 10 * (fewest_steps(300, 9) - 299)
    assert found.recompute_ns < 3 * 10 * 300


def test_too_little_memory_is_infeasible() -> None:
    with pytest.raises(InfeasibleBudget):
        chain.solve(Problem(chain_graph(20), 15), time_limit=10)


def test_no_time_no_order() -> None:
    """A chain that is not solved in time is given up, not waited for."""
    instance = Instance(Problem(chain_graph(60), 120))
    assert chain.chain_order(instance, 120, end=0.0) is None
    assert chain.chain_order(instance, 120) is not None
