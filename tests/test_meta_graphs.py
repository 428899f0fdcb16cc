"""A model on the meta device is priced like the same model with memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import plan
from planner.engine import Engine
from planner.request import Inputs, Request
from tests.models import Perceptron, bert, llama, resnet
from tracer.costs import signature
from tracer.extract import StepGraph, likely_absent
from tracer.torch_private import FakeTensor, FakeTensorMode, meta_as_cpu

PROFILE = "h100-80gb"


def step_of(model: torch.nn.Module, batch: dict[str, Any]) -> StepGraph:
    engine = Engine(model, Request(None, torch.optim.AdamW, None, PROFILE))
    inputs = Inputs((), batch)
    traced = engine.trace(inputs)
    return engine.extract(traced, inputs, likely_absent(traced.joint))


@pytest.mark.parametrize("make", [bert, llama, resnet])
def test_the_same_graph_and_costs(make: Any) -> None:
    here = step_of(*make()).graph
    with torch.device("meta"):
        model, batch = make()
    away = step_of(model, batch)
    assert away.graph.fingerprint() == here.fingerprint()
    trainable = sum(p.requires_grad for p in model.parameters())
    assert sum(g is not None for g in away.gradient_values) == trainable


def test_deeper_models_of_the_same_blocks_have_no_new_operations() -> None:
    """So that they are priced, and on a device measured, at no further cost."""
    found = []
    for layers in (2, 4):
        with torch.device("meta"):
            step = step_of(*bert(dropout=0.1, layers=layers))
        found.append({signature(node) for node in step.op_nodes if node is not None})
    assert found[0] == found[1]


def test_traced_layouts_are_those_that_run() -> None:
    """The fake group norm of torch 2.14 forgets channels-last."""
    norm = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    engine = Engine(norm, Request(None, None, torch.device("cpu")))
    inputs = Inputs((x,), {})
    step = engine.extract(engine.trace(inputs), inputs, frozenset())
    (node,) = [n for n in step.op_nodes if n and "native_group_norm.default" in str(n.target)]
    assert node.meta["val"][0].stride() == norm[:2](x).stride()
    assert norm[1](norm[0](x)).is_contiguous(memory_format=torch.channels_last)


def test_a_planned_model_stays_on_the_meta_device() -> None:
    model, x = Perceptron().to("meta"), torch.empty(8, 64, device="meta")
    made = plan(model, x, budget_gb=1, hardware=PROFILE)
    assert made.peak_bytes > sum(p.numel() for p in model.parameters()) * 4 * 2
    assert all(p.is_meta for p in model.parameters())


def test_fake_tensors_lie_elsewhere_only_within() -> None:
    made = FakeTensor.__new__
    real = torch.empty(3, device="meta")
    with FakeTensorMode() as mode, meta_as_cpu():
        assert mode.from_tensor(real).device.type == "cpu"
        assert torch.empty(3, device="meta").device.type == "cpu"
        assert torch.empty(3, device="cuda").device.type == "cuda"
    assert FakeTensor.__new__ is made
