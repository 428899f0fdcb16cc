"""The simulator against a second account of memory, and the fast prices against the simulator."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.instance import Instance
from planner.problem import Problem
from planner.timeline import Timeline
from runtime.schedule import (
    Boundary,
    Compute,
    Deliver,
    Free,
    Schedule,
    ScheduleError,
    Step,
    check,
    save_all_order,
)
from runtime.simulator import holdings, simulate
from tests.graphs import GraphMaker, small_graphs, transformer_graph
from tracer.graph import ComputationGraph, Kind


def with_second_runs(graph: ComputationGraph, rnd: random.Random, most: int = 6) -> list[int]:
    """The plain order with up to `most` operations inserted again, anywhere after their first."""
    order = list(save_all_order(graph))
    able = [op.index for op in graph.operations if op.recomputable]
    for _ in range(rnd.randint(0, most) if able else 0):
        o = rnd.choice(able)
        order.insert(rnd.randint(order.index(o) + 1, len(order) - 1), o)
    return order


def two_layers() -> ComputationGraph:
    """x0 -> x1 -> x2 -> loss, sizes 4 and 8, by hand."""
    m = GraphMaker()
    x0 = m.value(100)
    (x1,) = m.op([x0], [4], time_ns=3)
    (x2,) = m.op([x1], [8], time_ns=5, workspace=2)
    m.op([x2], [1], kinds=[Kind.OUTPUT], time_ns=1)
    tangent = m.value(1, Kind.TANGENT)
    (g2,) = m.op([tangent, x2], [8], backward=True, time_ns=1)
    m.op([g2, x1], [4, 6], backward=True, kinds=[Kind.GRADIENT] * 2, time_ns=10)
    return m.graph(fixed=100)


def test_by_hand() -> None:
    graph = two_layers()
    plain = simulate(graph, Schedule.from_order(graph, (0, 1, 2, 3, 4)))
    # The last operation: fixed 100, output 1, x1 4, g2 8 and two gradients of 10.
    assert plain.peak_bytes == 123
    assert plain.boundary_bytes == 1 + 4 + 8
    assert plain.time_ns == 20
    again = simulate(graph, Schedule.from_order(graph, (0, 1, 2, 3, 0, 4)))
    assert again.boundary_bytes == 1 + 8  # x1 is let go after the operation that makes x2
    assert again.recompute_ns == 3
    assert again.peak_bytes == 123


def read_late() -> ComputationGraph:
    """Two weights; the first one's gradient is complete first, and it is read last."""
    m = GraphMaker()
    first, second = m.value(4), m.value(4)
    (x1,) = m.op([first], [8])
    (x2,) = m.op([x1, second], [8])
    m.op([x2, first], [1], kinds=[Kind.OUTPUT])
    m.op([m.value(1, Kind.TANGENT), x2], [4, 8], backward=True, kinds=[Kind.GRADIENT])
    m.op([m.op([x1], [4], backward=True, kinds=[Kind.GRADIENT])[0], first], [2], backward=True)
    graph = m.graph()
    one, two = (v.index for v in graph.values if v.kind is Kind.GRADIENT)
    values = list(graph.values)
    values[one] = dataclasses.replace(values[one], of=(first,))
    values[two] = dataclasses.replace(values[two], of=(second,))
    return dataclasses.replace(graph, values=tuple(values))


def test_a_gradient_leaves_after_the_last_read_of_what_it_is_of() -> None:
    graph = read_late()
    steps = Schedule.from_order(graph, range(len(graph.operations))).steps
    one, two = (v.index for v in graph.values if v.kind is Kind.GRADIENT)
    last = steps.index(Compute(len(graph.operations) - 1))
    assert all(steps.index(d) > last for d in steps if isinstance(d, Deliver) and one in d.values)
    early: list[Step] = [s for s in steps if not isinstance(s, Deliver)]
    early.insert(early.index(Compute(4)), Deliver((one,)))
    with pytest.raises(ScheduleError, match="v0, which is not held"):
        check(graph, Schedule((*early, Deliver((two,)))))


def test_gradients_stay_unless_they_accumulate() -> None:
    graph = two_layers()
    steps = Schedule.from_order(graph, range(5)).steps
    assert isinstance(steps[-1], Deliver)
    held = dict(holdings(graph, Schedule(steps)))[len(steps) - 1]
    assert {graph.values[v].kind for v in held} == {Kind.GRADIENT, Kind.OUTPUT}
    accumulating = ComputationGraph(graph.operations, graph.values, graph.fixed_bytes, True)
    held = dict(holdings(accumulating, Schedule(steps)))[len(steps) - 1]
    assert {graph.values[v].kind for v in held} == {Kind.OUTPUT}


@settings(max_examples=150)
@given(small_graphs(), st.randoms(use_true_random=False))
def test_memory_is_what_the_steps_hold(graph: ComputationGraph, rnd: random.Random) -> None:
    schedule = Schedule.from_order(graph, with_second_runs(graph, rnd))
    check(graph, schedule)
    found = simulate(graph, schedule)
    before: frozenset[int] = frozenset()
    for (number, held), nbytes in zip(holdings(graph, schedule), found.held_bytes, strict=True):
        step = schedule.steps[number]
        counted = held if isinstance(step, Boundary | Compute) else before
        expected = graph.fixed + sum(graph.values[v].nbytes for v in counted)
        if isinstance(step, Compute):
            op = graph.operations[step.op]
            twice = before.intersection(op.outputs)
            expected += op.workspace + sum(graph.values[v].nbytes for v in twice)
        assert nbytes == expected
        before = held


@settings(max_examples=150)
@given(small_graphs(), st.randoms(use_true_random=False))
def test_fast_price_is_the_simulators(graph: ComputationGraph, rnd: random.Random) -> None:
    order = with_second_runs(graph, rnd)
    schedule = Schedule.from_order(graph, order)
    found = simulate(graph, schedule)
    instance = Instance(Problem(graph, 0))
    computed = [
        nbytes
        for step, nbytes in zip(schedule.steps, found.held_bytes, strict=True)
        if isinstance(step, Compute)
    ]
    assert instance.profile(order)[: len(order)] == computed
    assert instance.peak(order) == found.peak_bytes
    assert instance.time_of(order) == found.time_ns


@settings(max_examples=150)
@given(small_graphs(), st.randoms(use_true_random=False))
def test_timeline_edits(graph: ComputationGraph, rnd: random.Random) -> None:
    order = with_second_runs(graph, rnd)
    instance = Instance(Problem(graph, 0))
    line = Timeline(instance, order)
    for row in line.again():
        memory = line.without(row)
        expected = instance.profile(order[:row] + order[row + 1 :])
        assert [*memory[:row], *memory[row + 1 :]] == expected
        other = line.copy()
        other.remove(row, memory)
        assert other.order == order[:row] + order[row + 1 :]
    at = rnd.randint(1, len(order) - 1)
    able = [o for o in order[:at] if graph.operations[o].recomputable]
    ops = [rnd.choice(able) for _ in range(rnd.randint(1, 4))] if able else []
    memory = line.with_runs(at, ops)
    assert memory.tolist() == instance.profile([*order[:at], *ops, *order[at:]])
    line.insert(at, ops, memory)
    fresh = Timeline(instance, [*order[:at], *ops, *order[at:]])
    assert (line.rows, line.first) == (fresh.rows, fresh.first)
    assert {v: r for v, r in line.made.items() if r} == {v: r for v, r in fresh.made.items() if r}
    assert {v: r for v, r in line.read.items() if r} == {v: r for v, r in fresh.read.items() if r}


def test_check_rejects() -> None:
    graph = two_layers()
    steps = Schedule.from_order(graph, range(5)).steps
    wrong = {
        "not held": (*steps[:1], Free(1), Free(1), *steps[1:]),
        "which is not held": (*steps[:1], Free(1), *steps[1:]),
        "no boundary": tuple(s for s in steps[:3] if not isinstance(s, Boundary)),
        "never run": steps[:3],
        "before the boundary": tuple(s for s in steps if not isinstance(s, Boundary)),
    }
    for message, program in wrong.items():
        with pytest.raises(ScheduleError, match=message if message != "no boundary" else "never"):
            check(graph, Schedule(program))


def test_large_graph_is_priced_quickly_and_alike() -> None:
    graph = transformer_graph(6, hidden=128, seq=64, batch=2, vocabulary=500)
    order = with_second_runs(graph, random.Random(0), most=100)
    instance = Instance(Problem(graph, 0))
    assert instance.peak(order) == simulate(graph, Schedule.from_order(graph, order)).peak_bytes
