"""`fit`: the answer is the largest that plans, and derived graphs are those that a trace gives."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.what_fits_table import FITS, lines
from examples.long_sequence import Layer
from planner.family import Family, canonical, structure
from planner.progress import listening
from tests.models import Perceptron
from tracer.errors import InfeasibleBudget, PlannerError
from tracer.graph import ComputationGraph

HARDWARE = "a100-80gb"


def rows(size: int) -> torch.Tensor:
    return torch.empty(size, 64, device="meta")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return Perceptron(64, 5)


def graph_of(model: nn.Module, batch: Any) -> ComputationGraph:
    made: planner.Plan = planner.plan(model, batch, budget_gb=1000, hardware=HARDWARE)
    return canonical(made.graph)


def close(derived: ComputationGraph, traced: ComputationGraph) -> None:
    """Equal structure; sizes equal up to the allocator's granularity."""
    assert structure(derived) == structure(traced)
    for value, other in zip(derived.values, traced.values, strict=True):
        assert abs(value.nbytes - other.nbytes) <= 512
    for op, same in zip(derived.operations, traced.operations, strict=True):
        assert abs(op.workspace - same.workspace) <= max(512, same.workspace // 50)


def test_derived_graphs_are_those_of_a_trace(model: nn.Module) -> None:
    family = Family(lambda size: graph_of(model, rows(size)))
    family.exactly(64)
    family.exactly(512)
    derived = family.at(200)
    assert not derived.traced and sorted(family.traced) == [64, 512]
    close(derived.graph, graph_of(model, rows(200)))
    assert family.at(4000).traced  # too far away to be derived


def test_sequences_are_quadratic() -> None:
    with torch.device("meta"):
        layer = Layer(64)

    def sequence(length: int) -> torch.Tensor:
        return torch.empty(1, length, 64, device="meta")

    family = Family(lambda size: graph_of(layer, sequence(size)))
    for length in (128, 256, 512):  # whole tiles: the attention kernel pads its workspace to 128
        family.exactly(length)
    close(family.at(384).graph, graph_of(layer, sequence(384)))


def test_one_more_does_not_fit(model: nn.Module) -> None:
    options: dict[str, Any] = {"budget_gb": 0.004, "hardware": HARDWARE}
    options["optimizer"] = torch.optim.Adam
    found = planner.fit(model, rows, points=3, time_limit=2.0, **options)
    assert found.plan.peak_bytes <= found.budget_bytes
    assert found.largest in found.traced and len(found.traced) <= 7
    planner.plan(model, rows(found.largest), solver="greedy", **options)
    with pytest.raises(InfeasibleBudget):
        planner.plan(model, rows(found.largest + 1), solver="greedy", **options)
    ample = {**options, "budget_gb": 1000}
    for size, fits in ((found.largest_plain, True), (found.largest_plain + 1, False)):
        peak = planner.plan(model, rows(size), **ample).peak_bytes
        assert (peak <= found.budget_bytes) is fits


def test_the_curve(model: nn.Module) -> None:
    found = planner.fit(
        model, rows, budget_gb=0.002, hardware=HARDWARE, points=[100, 10**9], time_limit=2.0
    )
    assert [p.size for p in found.curve] == [100, found.largest]  # what does not fit is left out
    small, large = found.curve
    assert small.overhead == 0 and large.overhead >= large.lower_bound > 0
    assert large.per_second == pytest.approx(large.size / large.step_ns * 1e9)
    assert found.best is max(found.curve, key=lambda p: p.per_second)
    assert str(found.largest) in str(found) and json.dumps(found.to_dict())
    assert found.plan.step_ns == large.step_ns


def test_the_plan_can_be_applied() -> None:
    torch.manual_seed(0)
    model = Perceptron(64, 8)
    found = planner.fit(
        model, lambda n: torch.ones(n, 64), budget_gb=0.002, points=1, multiple=16, time_limit=2.0
    )
    assert found.largest % 16 == 0
    assert found.plan.verify(torch.ones(found.largest, 64)).bitwise


def test_layers() -> None:
    def deep(layers: int) -> nn.Module:
        with torch.device("meta"):
            return Perceptron(64, layers)

    batch = rows(512)
    found = planner.fit(
        deep,
        lambda _: batch,
        budget_gb=0.00125,
        over="layers",
        hardware=HARDWARE,
        points=1,
        solver="greedy",
    )
    with pytest.raises(InfeasibleBudget):
        planner.plan(
            deep(found.largest + 1), batch, budget_gb=0.00125, hardware=HARDWARE, solver="greedy"
        )
    assert 1 < found.largest_plain < found.largest


def test_what_is_given_wrongly(model: nn.Module) -> None:
    options: dict[str, Any] = {"budget_gb": 0.002, "hardware": HARDWARE}

    def failing(size: int) -> torch.Tensor:
        raise ValueError(f"{size} is too much")

    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model, rows), {"over": "width"}, "over='width'"),
        ((model, rows), {"over": "layers"}, "function of the number of layers"),
        ((model, rows), {"multiple": 0}, "multiple=0"),
        ((model, rows), {"points": 0}, "points=0"),
        ((model, rows), {"points": [0]}, "points=0"),
        ((model, failing), {}, r"inputs\(\d+\) raised ValueError"),
        ((model, lambda _: None), {}, "None instead of a batch"),
        ((3, rows), {}, "model is a int"),
        ((model, rows), {"budget_gb": 0}, "budget_gb=0"),
    ]
    for arguments, more, message in wrong:
        with pytest.raises(PlannerError, match=message):
            planner.fit(*arguments, **{**options, **more})
    with pytest.raises(InfeasibleBudget) as caught:
        planner.fit(model, rows, **{**options, "budget_gb": 1e-6})
    assert caught.value.minimum_bytes > 1000


def test_progress_is_told(model: nn.Module) -> None:
    told: list[str] = []
    with listening(lambda what, done, total: told.append(what)):
        planner.plan(model, rows(64), budget_gb=1, hardware=HARDWARE)
    assert {"capturing the step", "pricing operations", "solving"} <= set(told)
    told.clear()
    planner.plan(model, rows(65), budget_gb=1, hardware=HARDWARE)
    assert told == []


def test_structure_sees_what_differs(model: nn.Module) -> None:
    graph = graph_of(model, rows(64))
    other = dataclasses.replace(graph, accumulate=True)
    assert structure(graph) == structure(graph_of(model, rows(96))) != structure(other)


def test_the_page_shows_the_results() -> None:
    page = (FITS.parents[1] / "how-to" / "what-fits.md").read_text()
    assert "\n".join(lines()) in page
