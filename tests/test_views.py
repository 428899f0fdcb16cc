"""Views are calls too: on a CPU each takes its time, on a GPU none does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from planner.engine import Engine
from planner.request import Inputs, Request
from runtime.rewrite import SCHEDULE_STEP, Callee, graph_of, rewrite
from runtime.schedule import Schedule
from tests.models import bert, gpt2, resnet
from tracer.extract import StepGraph, extract
from tracer.fused import FusedCosts
from tracer.hardware import load_profile
from tracer.measured import MeasuredCosts
from tracer.roofline import RooflineCosts

VIEW_NS = 1_000_000


class PricedViews(RooflineCosts):
    """The same costs with another price of views."""

    price = 0

    @property
    def view_ns(self) -> int:
        return self.price


def steps_of(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[StepGraph, StepGraph]:
    """The step with views for nothing, and with views at `VIEW_NS`."""
    engine = Engine(model, Request(None, None, torch.device("cpu")))
    joint = engine.trace(Inputs((), batch)).joint
    costs = PricedViews(load_profile("a100-80gb"))
    free = extract(joint, costs, absent=frozenset())
    costs.price = VIEW_NS
    return free, extract(joint, costs, absent=frozenset())


def views_in(*callees: Callee) -> set[str]:
    """Names of the calls that the schedule does not know of."""
    nodes = [n for c in callees for n in graph_of(c).graph.nodes]
    calls = [n for n in nodes if n.op in ("call_function", "call_method")]
    return {n.name for n in calls if "getitem" not in str(n.target) and SCHEDULE_STEP not in n.meta}


@pytest.mark.parametrize("make", [bert, gpt2, resnet])
def test_each_view_of_the_graphs_that_run_is_paid_for_once(make: Any) -> None:
    free, priced = steps_of(*make())
    order = tuple(range(len(free.graph.operations)))
    run = rewrite(free, Schedule.from_order(free.graph, order))
    # A slice of the backward pass may make a view again, which counts once: few do.
    made = len(views_in(run.forward)) + len(views_in(*(s.function for s in run.slices)))
    paid = priced.graph.time_ns - free.graph.time_ns
    assert paid > 0
    assert made - run.num_outputs <= paid / VIEW_NS <= made  # outputs that are views are free


def test_only_a_cpu_is_waited_for() -> None:
    gpu = RooflineCosts(load_profile("a100-80gb"))
    assert gpu.view_ns == 0
    cpu = RooflineCosts(dataclasses.replace(gpu.profile, device="cpu"))
    assert cpu.view_ns == cpu.profile.launch_ns
    assert MeasuredCosts("cuda").view_ns == 0
    assert FusedCosts(cpu).view_ns == 0


def test_a_view_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    first = MeasuredCosts("cpu").view_ns
    assert first > 0
    monkeypatch.setattr("tracer.measured.view_ns", None)  # calling it would fail
    again = MeasuredCosts("cpu")
    again.prepare([])
    assert again.view_ns == first
