"""`Plan.verify`: what it counts, and the first place where bytes are other than predicted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx, nn

from planner import plan
from runtime.observe import held_at_marks
from tests.models import Perceptron
from tracer.costs import OperationCost, target_name
from tracer.measured import MeasuredCosts

MIB = 1 << 20


class Odd(nn.Module):
    """One operation of each kind, so that a place can be named."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.second(torch.tanh(self.first(x))))


def wrong_cost(monkeypatch: pytest.MonkeyPatch, target: str, **changed: Any) -> None:
    """Gives one operator another cost than it has."""
    honest = MeasuredCosts.cost

    def cost(self: MeasuredCosts, node: fx.Node) -> OperationCost:
        found = honest(self, node)
        return dataclasses.replace(found, **changed) if target_name(node) == target else found

    monkeypatch.setattr(MeasuredCosts, "cost", cost)


@pytest.mark.parametrize(
    ("target", "what"),
    [("aten.tanh.default", "forward"), ("aten.sigmoid_backward.default", "backward")],
)
def test_a_wrong_cost_is_found_at_its_operation(monkeypatch, target, what):
    model, x = Odd(), torch.rand(64, 256)
    assert plan(model, x, budget_gb=1).verify(x).parting is None
    wrong_cost(monkeypatch, target, workspace=MIB)
    check = plan(model, x, budget_gb=1).verify(x)
    parting = check.parting
    assert parting is not None and (parting.op, parting.what) == (target, what)
    assert abs(parting.predicted_bytes - parting.measured_bytes - MIB) < 4096
    assert "fewer than predicted" in str(check) and target in str(check)


def test_a_value_that_is_larger_than_predicted_parts_where_it_is_made(monkeypatch):
    model, x = Odd(), torch.rand(64, 256)
    wrong_cost(monkeypatch, "aten.tanh.default", outputs=(0,))
    parting = plan(model, x, budget_gb=1).verify(x).parting
    assert parting is not None and parting.op == "aten.tanh.default"
    assert abs(parting.measured_bytes - parting.predicted_bytes - 64 * 256 * 4) < 4096


@pytest.mark.parametrize("allocated", [False, True])
def test_the_state_of_the_optimizer_counts(allocated):
    model, x = Perceptron(512, 4), torch.rand(64, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    if allocated:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for made in (torch.optim.AdamW, optimizer):
        p = plan(model, x, budget_gb=1, optimizer=made)
        check = p.verify(x)
        state = dict(p.breakdown)["optimizer state"]
        assert state > 2 * sum(q.numel() * 4 for q in model.parameters())
        assert check.planned.peak_bytes == pytest.approx(check.predicted_bytes, rel=0.005)
        assert check.parting is None and check.bitwise
        assert check.plain.peak_bytes > state
    assert all((q.grad is not None) is allocated for q in model.parameters())


def test_the_step_of_the_optimizer_is_named_where_it_is_the_peak():
    model, x = Perceptron(512, 4), torch.rand(2, 512)
    p = plan(model, x, budget_gb=1, optimizer=torch.optim.AdamW)
    check = p.verify(x)
    assert check.optimizer_bytes == p.peak_bytes > check.predicted_bytes
    assert check.planned.peak_bytes == pytest.approx(check.predicted_bytes, rel=0.005)
    assert "the optimizer's step" in str(check)


class Recurrent(nn.Module):
    """An LSTM, which the trace takes apart into its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64, num_layers=2, batch_first=True), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0]).square().mean()  # type: ignore[no-any-return]


def test_recurrent_layers_are_one_graph():
    torch.manual_seed(0)
    model, x = Recurrent(), torch.rand(64, 6, 64)
    wide = plan(model, x, budget_gb=1, hardware="cpu")
    assert not wide.breaks and torch.backends.mkldnn.enabled
    least = wide.minimum_peak_bytes / 1e9
    tight = plan(model, x, budget_gb=least, hardware="cpu", time_limit=2)
    assert tight.recomputed and tight.peak_bytes < 0.9 * wide.peak_bytes
    check = tight.verify(x)
    assert max(difference for difference, _ in check.worst.values()) < 1e-6
    assert check.planned.peak_bytes < 1.01 * tight.peak_bytes


def test_verify_leaves_programs_unmarked():
    model, x = Odd(), torch.rand(64, 256)
    p = plan(model, x, budget_gb=1)
    p.verify(x)
    p.apply()

    def step() -> Any:
        model(x).sum().backward()

    step()
    assert held_at_marks(step, model, x).keys() == {-1}


class Mixed(nn.Module):
    """Convolutions whose layout oneDNN decides, before a kernel that is particular about it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.after = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch", [1, 2])
def test_layouts_of_convolutions_are_those_of_the_kernels(batch):
    torch.manual_seed(0)
    x = torch.rand(batch, 3, 12, 12).to(memory_format=torch.channels_last)
    assert plan(Mixed(), x, budget_gb=1, hardware="cpu").verify(x).bitwise
