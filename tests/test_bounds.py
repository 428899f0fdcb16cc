"""Lower bounds hold for every schedule, which the oracle and the baselines witness."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import bounds
from planner.bounds import lower_bound, solve_boundary
from planner.closing import Closing
from planner.instance import Instance
from planner.linear import Limits, Program, ProgramError
from planner.minimum import minimum_peak, unavoidable_peak
from planner.oracle import least_peak_order, optimal_order
from planner.problem import Problem
from planner.solvers import SOLVERS
from planner.solvers.staged import Found
from planner.staged_program import base_memory, staged_program
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tests.graphs import chain_graph, small_problems, transformer_graph

CASES = int(os.environ.get("CASES", "100"))


@settings(max_examples=CASES)
@given(small_problems(), st.data())
def test_no_schedule_beats_the_bound(problem: Problem, data: st.DataObject) -> None:
    instance = Instance(problem)
    best = optimal_order(instance)
    moment = st.integers(0, instance.count - 1).map(lambda t: (t, t))
    moments = data.draw(st.lists(moment, max_size=4, unique=True))
    try:
        bound = lower_bound(instance, problem.budget_bytes, moments)
    except ProgramError as error:
        assert error.infeasible
        assert best is None, "the bound's program rules out a schedule that exists"
        return
    assert bound >= problem.graph.time_ns
    if best is not None:
        assert bound <= instance.time_of(best)


def test_very_large_graphs_have_the_relaxed_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = transformer_graph(6)
    plain = Instance(Problem(graph, 0)).peak(save_all_order(graph))
    budget = graph.fixed + int(0.4 * (plain - graph.fixed))
    instance = Instance(Problem(graph, budget))
    exact = lower_bound(instance, budget)
    monkeypatch.setattr(bounds, "_BOUNDARY_COLUMNS", 0)
    assert graph.time_ns < lower_bound(instance, budget) < exact


@settings(max_examples=CASES)
@given(small_problems(), st.data())
def test_closing_keeps_the_optimum_between_bound_and_order(
    problem: Problem, data: st.DataObject
) -> None:
    instance = Instance(problem)
    best = optimal_order(instance)
    if best is None:
        return
    _, order = minimum_peak(problem.graph, problem.keep, problem.recompute)
    moment = st.integers(0, instance.count - 1).map(lambda t: (t, t))
    moments = tuple(data.draw(st.lists(moment, max_size=4, unique=True)))
    found = Found(tuple(order), instance.time_of(order), moments)
    closing = Closing(instance, found, problem.graph.time_ns)
    closing.run((1, 2, 4), time.monotonic() + 60)
    assert closing.bound <= instance.time_of(best) <= found.time_ns == instance.time_of(found.order)
    assert instance.peak(found.order) <= problem.budget_bytes
    assert instance.obeys(found.order)


@settings(max_examples=100)
@given(small_problems())
def test_more_moments_never_lower_the_optimum(problem: Problem) -> None:
    """Of whole numbers; the relaxation may differ."""
    instance = Instance(problem)
    every = [(t, t) for t in range(instance.count)]
    optima = []
    for moments in (every[:0], every[::2], every):
        try:
            program = staged_program(instance, problem.budget_bytes, moments).program
            optima.append(program.solve().objective)
        except ProgramError:
            optima.append(float("inf"))
    assert optima[0] <= optima[1] + 1e-6
    assert optima[1] <= optima[2] + 1e-6


@settings(max_examples=100)
@given(small_problems())
def test_unavoidable_peak(problem: Problem) -> None:
    instance = Instance(problem)
    least, order = minimum_peak(problem.graph, problem.keep, problem.recompute)
    assert unavoidable_peak(instance) <= least == instance.peak(order)
    assert least == instance.peak(least_peak_order(instance, 0, order))


def test_base_memory_is_what_choices_leave() -> None:
    graph = transformer_graph(2, hidden=64, seq=32, batch=2, vocabulary=100)
    instance = Instance(Problem(graph, 0))
    base, between = base_memory(instance)
    schedule = Schedule.from_order(graph, save_all_order(graph))
    assert max(base) <= simulate(graph, schedule).peak_bytes
    assert all(b >= graph.fixed for b in between)


def test_forced_by_one_moment() -> None:
    """Two layers fit at the boundary but not beside the gradient: only a moment shows it."""
    graph = chain_graph(3, size=10, time_ns=10)
    instance = Instance(Problem(graph, 40))
    plain = lower_bound(instance, 40)
    sharp = lower_bound(instance, 40, [(graph.boundary + 1, graph.boundary + 1)])
    assert plain <= sharp
    best = optimal_order(instance)
    assert best is not None
    assert sharp <= instance.time_of(best)


@pytest.mark.parametrize("fraction", [0.7, 0.4, 0.25])
def test_bound_is_sharp_on_a_transformer(fraction: float) -> None:
    graph = transformer_graph(6, hidden=256, seq=128, batch=8, vocabulary=2000)
    peak = simulate(graph, Schedule.from_order(graph, save_all_order(graph))).peak_bytes
    budget = graph.fixed + int(fraction * (peak - graph.fixed))
    instance = Instance(Problem(graph, budget))
    boundary = solve_boundary(instance, budget).bound_ns
    found = SOLVERS["auto"](Problem(graph, budget), time_limit=60)
    time = instance.time_of(found.order)
    assert boundary <= found.bound_ns <= time
    assert time - found.bound_ns <= 0.006 * graph.time_ns


def test_a_stopped_integer_program_gives_its_dual_bound() -> None:
    """A knapsack stopped at the root: the bound is below the optimum, never the incumbent."""
    program = Program("knapsack")
    sizes = [13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
    columns = [program.column(f"x{i}", -float(size + i % 3)) for i, size in enumerate(sizes)]
    program.row("room", zip(columns, map(float, sizes), strict=True), upper=111.0)
    best = program.solve()
    assert best.optimal
    assert best.objective == pytest.approx(best.bound)
    stopped = program.solve(Limits(gap=0.5))
    assert not stopped.optimal
    assert stopped.bound <= best.objective + 1e-6
    assert program.solve(relaxed=True).bound <= best.objective + 1e-6


def test_the_fallback_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without highspy the programs go to CBC."""
    pulp = pytest.importorskip("pulp")
    if not pulp.PULP_CBC_CMD(msg=False).available():
        pytest.skip("no CBC on this machine")
    graph = chain_graph(5, size=10, time_ns=10)
    instance = Instance(Problem(graph, 60))
    program = staged_program(instance, 60, [(7, 7)]).program
    expected, relaxed = program.solve(), program.solve(relaxed=True)
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    assert program.solve().objective == pytest.approx(expected.objective)
    assert program.solve(relaxed=True).bound == pytest.approx(relaxed.bound)
    with pytest.raises(ProgramError):
        staged_program(instance, 20, [(7, 7)]).program.solve()


def test_the_boundary_program_that_presolve_went_round_in_ends() -> None:
    """In a process of its own: where it comes back, the solver does not look at its clock."""
    code = (
        "from planner.bounds import BOUNDARY_LIMITS, solve_boundary\n"
        "from planner.instance import Instance\n"
        "from planner.problem import Problem\n"
        "from tests import compact\n"
        "graph = compact.load('bert-12')\n"
        "instance = Instance(Problem(graph, 993_035_544))\n"
        "answer = solve_boundary(instance, 993_035_544, BOUNDARY_LIMITS)\n"
        "print(answer.bound_ns > graph.time_ns)\n"
    )
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr
