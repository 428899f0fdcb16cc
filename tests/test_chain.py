"""The chain solver: blocks, and orders that certificates accept."""

from __future__ import annotations

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
        8, hidden=256, seq=256, batch=2, vocabulary=1000, accumulate=accumulate
    )
    times = []
    for fraction in (0.8, 0.6, 0.4, 0.3):
        problem = at_fraction(graph, fraction)
        found = price(graph, chain.solve(problem, time_limit=60).order)
        assert found.peak_bytes <= problem.budget_bytes
        bound = solve_boundary(Instance(problem), problem.budget_bytes).bound_ns
        assert bound <= found.time_ns
        times.append(found.time_ns)
    assert times == sorted(times)


def test_a_long_chain_in_little_memory() -> None:
    """200 layers in the memory of a dozen: far below the square root's twenty-eight."""
    graph = chain_graph(200, size=10, time_ns=10)
    problem = Problem(graph, 140)
    found = price(graph, chain.solve(problem, time_limit=60).order)
    assert found.peak_bytes <= 140
    forward = sum(op.time_ns for op in graph.operations if op.is_forward)
    assert found.recompute_ns < 3 * forward  # two and a half passes on average suffice


def test_too_little_memory_is_infeasible() -> None:
    with pytest.raises(InfeasibleBudget):
        chain.solve(Problem(chain_graph(20), 15), time_limit=10)
