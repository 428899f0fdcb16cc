"""The frontier: one trace, certified points, monotone, and plans that run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

import planner.engine
from planner import Frontier, InfeasibleBudget, InvalidBudget, PlannerError, frontier
from planner.instance import Instance
from planner.minimum import minimum_peak
from planner.oracle import optimal_order
from planner.problem import Problem
from planner.sweep import sweep
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tests.graphs import small_problems, transformer_graph
from tests.models import Perceptron, bert


@pytest.fixture(scope="module")
def curve() -> Frontier:
    torch.manual_seed(0)
    model, batch = bert()
    return frontier(model, batch, points=6, hardware="a100-80gb")


def test_points_are_certified_and_monotone(curve: Frontier) -> None:
    assert len(curve.points) == 6
    assert curve.points[0].budget_bytes == curve.minimum_peak_bytes
    assert curve.points[-1].overhead == 0.0
    assert curve.points[-1].peak_bytes == curve.baseline_peak_bytes
    for point in curve.points:
        assert point.peak_bytes <= point.budget_bytes
        assert 0.0 <= point.lower_bound <= point.overhead
    for less, more in zip(curve.points, curve.points[1:], strict=False):
        assert less.budget_bytes < more.budget_bytes
        assert less.overhead >= more.overhead
        assert less.lower_bound >= more.lower_bound
    assert f"{curve.points[0].overhead:.2%}" in str(curve)


def test_a_point_becomes_a_plan_that_trains() -> None:
    torch.manual_seed(0)
    model, x = Perceptron(32, 4), torch.randn(128, 32)
    plain = copy.deepcopy(model)
    curve = frontier(model, x, points=4, hardware="cpu")
    point = curve.points[1]
    p = curve.plan(point.budget_bytes / 1e9)
    assert (p.order, p.peak_bytes, p.overhead) == (point.order, point.peak_bytes, point.overhead)
    assert (p.lower_bound, p.status, p.solver) == (point.lower_bound, point.status, "frontier")
    p.apply()
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    p.remove()


def test_given_budgets_one_trace_and_any_budget_between(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Perceptron(32, 4), torch.randn(128, 32)
    traces = _count_traces(monkeypatch)
    whole = frontier(model, x, points=2, hardware="cpu")
    low, high = (p.budget_bytes / 1e9 for p in whole.points)
    middle = (low + high) / 2
    curve = frontier(model, x, points=[high, middle], hardware="cpu")
    assert [p.budget_bytes for p in curve.points] == [round(middle * 1e9), round(high * 1e9)]
    assert curve.at((middle + high) / 2) == curve.points[0]
    curve.plan(high), curve.plan(middle)
    assert traces() == 2  # one for each call of `frontier`


def _count_traces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[object] = []
    trace = planner.engine.Engine.trace

    def counted(engine: planner.engine.Engine, inputs: object) -> object:
        calls.append(inputs)
        return trace(engine, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(planner.engine.Engine, "trace", counted)
    return lambda: len(calls)


def test_bad_points(curve: Frontier) -> None:
    model, x = Perceptron(32, 4), torch.randn(128, 32)
    with pytest.raises(PlannerError, match="points=0"):
        frontier(model, x, points=0, hardware="cpu")
    with pytest.raises(PlannerError, match="points=True"):
        frontier(model, x, points=True, hardware="cpu")
    with pytest.raises(InvalidBudget, match="budget_gb=-1"):
        frontier(model, x, points=[1, -1], hardware="cpu")
    with pytest.raises(InvalidBudget, match="budget_gb='auto'"):
        frontier(model, x, points=["auto"], hardware="cpu")  # type: ignore[list-item]
    with pytest.raises(InfeasibleBudget, match="least feasible budget"):
        frontier(model, x, points=[1e-6], hardware="cpu")
    with pytest.raises(PlannerError, match="example_inputs is missing"):
        frontier(model, hardware="cpu")
    with pytest.raises(InfeasibleBudget):
        curve.at(1e-6)


def test_pickled_as_data(curve: Frontier) -> None:
    other = pickle.loads(pickle.dumps(curve))
    assert other == curve
    assert other.to_dict()["points"][0]["peak_bytes"] == curve.points[0].peak_bytes
    with pytest.raises(PlannerError, match="knows no model"):
        other.plan(curve.points[0].budget_bytes / 1e9)


@settings(max_examples=30)
@given(small_problems())
def test_every_point_of_a_sweep_is_certified(problem: Problem) -> None:
    graph = problem.graph
    least, _ = minimum_peak(graph, problem.keep, problem.recompute)
    most = max(least, Instance(problem).peak(save_all_order(graph)))
    budgets = sorted({least, (least + most) // 2, most})
    times = []
    for budget, solution in zip(budgets, sweep(problem, budgets, time_limit=60), strict=True):
        price = simulate(graph, Schedule.from_order(graph, solution.order))
        assert price.peak_bytes <= budget
        instance = Instance(problem).at(budget)
        assert instance.obeys(solution.order)
        best = optimal_order(instance)
        assert best is not None
        assert solution.bound_ns <= instance.time_of(best) <= price.time_ns
        times.append(price.time_ns)
    assert times == sorted(times, reverse=True)


def test_time_that_is_up_leaves_valid_points() -> None:
    graph = transformer_graph(4, hidden=128, seq=128, batch=4, vocabulary=1000)
    problem = Problem(graph, 0)
    least, _ = minimum_peak(graph)
    budgets = [least, 2 * least, simulate_peak(problem)]
    solutions = sweep(problem, budgets, time_limit=1e-9)
    for budget, solution in zip(budgets, solutions, strict=True):
        assert simulate(graph, Schedule.from_order(graph, solution.order)).peak_bytes <= budget


def simulate_peak(problem: Problem) -> int:
    return Instance(problem).peak(save_all_order(problem.graph))
