"""Models on the meta device give the graph of the same model on a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.engine import Engine
from planner.request import Inputs, Request


class Net(nn.Module):
    def __init__(self, tail: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(1))
        self.tail = tail

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.tail(self.linear(x) * self.weight, labels)


TAILS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "prelu": lambda x, y: F.prelu(x, x.mean().reshape(1)).sum(),
    "std": lambda x, y: x.std() + x.var(dim=0).sum(),
    "where": lambda x, y: torch.where(x > 0, x, 0.0).sum(),
    "upsample": lambda x, y: F.interpolate(x[:, None], scale_factor=2.0, mode="nearest").sum(),
    "relu6": lambda x, y: F.relu6(F.selu(x)).sum(),
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_composite_operators_pass_gradients_on(tail: Callable[..., torch.Tensor]) -> None:
    graphs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Net(tail)
            batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
        made = planner.plan(model, batch, budget_gb=1, hardware="v100-32gb")
        graphs.append(made.graph)
    real, meta = graphs
    assert len(meta.operations) > meta.boundary
    assert [op.target for op in meta.operations] == [op.target for op in real.operations]
    assert [v.kind for v in meta.values] == [v.kind for v in real.values]


def test_another_size_passes_gradients_on_too() -> None:
    """Later captures of one model, in which the size may be a symbol."""
    with torch.device("meta"):
        model = Net(F.cross_entropy)
    engine = Engine(model, Request(10**9, hardware="v100-32gb"))
    targets = []
    for size in (4, 6, 9):
        with torch.device("meta"):
            batch = torch.ones(size, 8), torch.zeros(size, dtype=torch.long)
        graph = engine.make_plan(engine.trace(Inputs(batch)), Inputs(batch)).graph
        assert len(graph.operations) > graph.boundary
        targets.append([op.target for op in graph.operations])
    assert targets[0] == targets[1] == targets[2]


def test_a_graph_without_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than planned as if nothing had to be kept."""
    monkeypatch.setattr("tracer.capture._on_meta", lambda model: False)
    with torch.device("meta"):
        model = Net(F.cross_entropy)
        batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    with pytest.raises(planner.PlannerError, match="no gradient"):
        planner.plan(model, batch, budget_gb=1, hardware="v100-32gb")
