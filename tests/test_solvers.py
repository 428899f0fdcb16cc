"""Every solver: certificates on random graphs, the oracle where it can look at everything."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from planner.instance import Instance
from planner.minimum import minimum_peak
from planner.oracle import TooLarge, optimal_order
from planner.problem import Problem, Solution
from planner.search import improve_order, reduce_order, repair_order
from planner.solvers import SOLVERS, staged
from runtime.schedule import Boundary, Schedule, save_all_order
from runtime.simulator import Simulation, holdings, simulate
from tests.graphs import (
    GraphMaker,
    renamed,
    small_graphs,
    small_problems,
    transformer_graph,
)
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph, Kind

# `CASES=2000 pytest tests/test_solvers.py -k oracle` looks at more; see CONTRIBUTING.md.
CASES = int(os.environ.get("CASES", "100"))
BASELINES = ("save_all", "per_block", "sqrt")


def certify(problem: Problem, solution: Solution) -> Simulation:
    """The order is a valid schedule within the budget that does what was asked for."""
    graph = problem.graph
    schedule = Schedule.from_order(graph, solution.order)
    price = simulate(graph, schedule)
    assert price.peak_bytes <= problem.budget_bytes
    assert solution.bound_ns <= price.time_ns
    assert not solution.exact or solution.bound_ns == price.time_ns
    again = {v for o in schedule.recomputed for v in graph.operations[o].outputs}
    assert not again & problem.keep
    boundary = next(i for i, s in enumerate(schedule.steps) if isinstance(s, Boundary))
    held = dict(holdings(graph, schedule))[boundary]
    assert not held & Instance(problem).dropped
    return price


def small_transformer(accumulate: bool = False) -> ComputationGraph:
    return transformer_graph(
        5, hidden=128, seq=128, batch=4, vocabulary=1000, accumulate=accumulate
    )


def at_fraction(graph: ComputationGraph, fraction: float) -> Problem:
    peak = simulate(graph, Schedule.from_order(graph, save_all_order(graph))).peak_bytes
    return Problem(graph, graph.fixed + int(fraction * (peak - graph.fixed)))


@settings(max_examples=CASES)
@given(small_problems())
def test_against_the_oracle(problem: Problem) -> None:
    instance = Instance(problem)
    best = optimal_order(instance)
    times: dict[str, int] = {}
    for name, solver in SOLVERS.items():
        try:
            solution = solver(problem, time_limit=60)
        except InfeasibleBudget as error:
            assert error.budget_bytes == problem.budget_bytes
            continue
        assert best is not None, f"{name} found what the oracle says is impossible"
        times[name] = certify(problem, solution).time_ns
    if best is None:
        return
    optimum = instance.time_of(best)
    assert times["exhaustive"] == times["ilp"] == times["auto"] == optimum
    assert all(time >= optimum for time in times.values())


@settings(max_examples=max(10, CASES // 8))
@given(small_problems(max_forward=12, max_backward=8))
def test_larger_ones_against_the_oracle(problem: Problem) -> None:
    """Up to twelve forward operations, of which the oracle can look at nearly all schedules."""
    instance = Instance(problem)
    try:
        best = optimal_order(instance)
    except TooLarge:
        reject()
    for name, solver in SOLVERS.items():
        if name == "exhaustive":  # the oracle itself
            continue
        try:
            solution = solver(problem, time_limit=60)
        except InfeasibleBudget:
            assert best is None or name not in ("ilp", "auto")
            continue
        assert best is not None, f"{name} found what the oracle says is impossible"
        optimum, time = instance.time_of(best), certify(problem, solution).time_ns
        assert solution.bound_ns <= optimum <= time
        assert time == optimum or name not in ("ilp", "auto")


@settings(max_examples=60)
@given(small_problems())
def test_the_minimum_works_and_a_byte_less_does_not(problem: Problem) -> None:
    graph = problem.graph
    least, order = minimum_peak(graph, problem.keep, problem.recompute)
    assert simulate(graph, Schedule.from_order(graph, order)).peak_bytes == least
    below = Problem(graph, least - 1, problem.keep, problem.recompute)
    assert optimal_order(Instance(below)) is None
    solver = SOLVERS["auto"]
    certify(
        Problem(graph, least, problem.keep, problem.recompute),
        solver(Problem(graph, least, problem.keep, problem.recompute), time_limit=60),
    )
    with pytest.raises(InfeasibleBudget) as caught:
        solver(below, time_limit=60)
    assert caught.value.minimum_bytes == least


@settings(max_examples=20)
@given(small_graphs(max_forward=14, max_backward=10), st.floats(0.0, 1.0))
def test_combined_solvers_beat_the_baselines(graph: ComputationGraph, share: float) -> None:
    """Graphs too large for the oracle: the path that large models take."""
    peak = simulate(graph, Schedule.from_order(graph, save_all_order(graph))).peak_bytes
    least, _ = minimum_peak(graph)
    problem = Problem(graph, least + int(share * (peak - least)))
    price = certify(problem, SOLVERS["auto"](problem, time_limit=60))
    for name in BASELINES:
        try:
            other = certify(problem, SOLVERS[name](problem, time_limit=60))
        except InfeasibleBudget:
            continue
        assert price.time_ns <= other.time_ns, name


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_transformer_at_many_budgets(accumulate: bool) -> None:
    graph = small_transformer(accumulate)
    least, _ = minimum_peak(graph)
    times = []
    for fraction in (0.35, 0.6, 1.0):
        problem = at_fraction(graph, fraction)
        if problem.budget_bytes < least:
            continue
        price = certify(problem, SOLVERS["auto"](problem, time_limit=60))
        times.append(price.time_ns)
        for name in (*BASELINES, "staged", "greedy"):
            try:
                other = certify(problem, SOLVERS[name](problem, time_limit=60))
            except InfeasibleBudget:
                continue
            assert name not in BASELINES or price.time_ns <= other.time_ns
    assert times == sorted(times, reverse=True)
    assert times[-1] == graph.time_ns


def test_a_graph_whose_tangents_arrive_at_its_end() -> None:
    """A piece of a step may have nothing to run backward, and its peak when the tangents come."""
    m = GraphMaker()
    (hidden,) = m.op([m.value(0)], [50])
    m.op([hidden], [40], kinds=[Kind.OUTPUT], workspace=5)
    m.value(80, Kind.TANGENT)
    graph = m.graph()
    least, order = minimum_peak(graph)
    assert (least, order) == (120, (0, 1))
    for solver in SOLVERS.values():
        problem = Problem(graph, least)
        assert certify(problem, solver(problem, time_limit=5)).peak_bytes == least
        with pytest.raises(InfeasibleBudget):
            solver(Problem(graph, least - 1), time_limit=5)


def test_least_budget_of_a_transformer() -> None:
    graph = small_transformer()
    least, _ = minimum_peak(graph)
    certify(Problem(graph, least), SOLVERS["auto"](Problem(graph, least), time_limit=5))
    with pytest.raises(InfeasibleBudget, match="least feasible budget") as caught:
        SOLVERS["auto"](Problem(graph, least - 1), time_limit=60)
    assert caught.value.minimum_bytes == least
    named, sizes = zip(*caught.value.limiting, strict=True)
    assert any("layers." in name or "head" in name for name in named)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_nothing_to_do() -> None:
    problem = at_fraction(small_transformer(), 1.0)
    solution = SOLVERS["auto"](problem, time_limit=60)
    assert solution.order == save_all_order(problem.graph)
    assert solution.exact


@settings(max_examples=40)
@given(small_problems(wishes=False), st.randoms(use_true_random=False))
def test_names_and_numbers_do_not_matter(problem: Problem, rnd: object) -> None:
    graph = problem.graph
    numbers = list(range(len(graph.values)))
    rnd.shuffle(numbers)  # type: ignore[attr-defined]
    other = Problem(renamed(graph, numbers), problem.budget_bytes)
    for name in ("auto", "ilp", "staged"):
        times = []
        for each in (problem, other):
            try:
                order = SOLVERS[name](each, time_limit=60).order
                times.append(Instance(each).time_of(order))
            except InfeasibleBudget:
                times.append(-1)
        assert times[0] == times[1]


def test_other_names_give_the_same_order() -> None:
    problem = at_fraction(small_transformer(), 0.5)
    same = renamed(problem.graph, range(len(problem.graph.values)))
    first = SOLVERS["auto"](problem, time_limit=60)
    second = SOLVERS["auto"](Problem(same, problem.budget_bytes), time_limit=60)
    assert first == second


def test_every_process_finds_the_same_plan() -> None:
    """Hash seeds differ between processes; the order must not."""
    program = (
        "import hashlib\n"
        "from tests.test_solvers import at_fraction, small_transformer, SOLVERS\n"
        "order = SOLVERS['auto'](at_fraction(small_transformer(), 0.4), time_limit=60).order\n"
        "print(hashlib.sha256(repr(order).encode()).hexdigest())\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    problem = at_fraction(small_transformer(), 0.4)
    order = SOLVERS["auto"](problem, time_limit=60).order
    assert other.stdout.strip() == hashlib.sha256(repr(order).encode()).hexdigest()


def test_wishes_are_kept() -> None:
    graph = small_transformer()
    problem = at_fraction(graph, 0.6)
    inside = [op for op in graph.operations if op.is_forward and op.module == "layers.2.mlp"]
    keep = frozenset(v for op in inside for v in op.outputs)
    gone = frozenset(
        v
        for op in graph.operations
        if op.module == "layers.4.attention" and op.is_forward
        for v in op.outputs
    )
    wished = Problem(graph, problem.budget_bytes, keep, gone)
    for name in ("auto", "staged", "greedy"):
        certify(wished, SOLVERS[name](wished, time_limit=60))


def test_repair_and_reduce() -> None:
    problem = at_fraction(small_transformer(), 0.4)
    instance = Instance(problem)
    repaired = repair_order(instance, save_all_order(problem.graph), problem.budget_bytes)
    assert repaired is not None
    assert instance.peak(repaired) <= problem.budget_bytes
    reduced = reduce_order(instance, repaired, problem.budget_bytes)
    improved = improve_order(instance, reduced, 20_000)
    assert instance.peak(improved) <= problem.budget_bytes
    assert instance.time_of(improved) <= instance.time_of(reduced) <= instance.time_of(repaired)


def test_staged_names_the_moments_that_bind() -> None:
    problem = at_fraction(small_transformer(), 0.4)
    found = staged.search(Instance(problem))
    assert found.order
    assert all(0 <= t < len(problem.graph.operations) for t, _ in found.binding)


@settings(max_examples=max(5, CASES // 20))
@given(small_problems(max_forward=12, max_backward=8))
def test_twelve_forward_operations_against_the_oracle(problem: Problem) -> None:
    """The integer program is exact on graphs that the oracle only just gets through."""
    instance = Instance(problem)
    try:
        best = optimal_order(instance)
    except TooLarge:
        return
    try:
        solution = SOLVERS["ilp"](problem, time_limit=600)
    except InfeasibleBudget:
        assert best is None
        return
    assert best is not None
    assert certify(problem, solution).time_ns == instance.time_of(best)


def test_oracle_refuses_large_graphs() -> None:
    problem = at_fraction(small_transformer(), 0.5)
    with pytest.raises(TooLarge):
        SOLVERS["exhaustive"](problem, time_limit=60)
