"""People compile the planned module, or a function that calls it: the plan must stay in force."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, plan
from runtime import measure


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.body = nn.Sequential(*parts, nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


def planned(model: nn.Module, x: torch.Tensor) -> Plan:
    ample = plan(model, x, budget_gb=1)
    least, most = ample.minimum_peak_bytes, ample.peak_bytes
    made = plan(model, x, budget_gb=(least + 0.3 * (most - least)) / 1e9)
    made.apply()
    assert made.recomputed
    return made


def around(model: nn.Module, backend: str) -> Callable[..., Any]:
    @torch.compile(backend=backend)
    def loss(x: torch.Tensor) -> Any:
        return model(x).sum() * 2

    return loss


def module(model: nn.Module, backend: str) -> Callable[..., Any]:
    compiled = torch.compile(model, backend=backend)
    return lambda x: compiled(x).sum() * 2


@pytest.mark.parametrize(("compiled", "backend"), [(around, "aot_eager"), (module, "eager")])
@pytest.mark.parametrize("make", [Net, lambda: Net().body], ids=["own class", "torch class"])
def test_the_plan_stays_in_force(
    make: Callable[[], nn.Module], compiled: Callable[..., Any], backend: str
) -> None:
    torch.compiler.reset()
    x = torch.randn(256, 64)
    model, plain = make(), make()
    made = planned(model, x)
    loss = compiled(model, backend)
    for call in (loss, lambda x: plain(x).sum() * 2):
        torch.manual_seed(5)
        call(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)

    def step() -> None:
        loss(x).backward()
        model.zero_grad()

    model.zero_grad()
    step()
    assert measure(step, model, None, x).peak_bytes <= made.budget_bytes
    assert copy.deepcopy(model)(x).shape == (256, 1)
    made.remove()
    assert not model._forward_hooks_with_kwargs


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    torch.compiler.reset()
    x = torch.randn(256, 64)
    model = Net()
    planned(model, x)
    whole = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="a plan is applied to this module"):
        whole(x)
    model(x).sum().backward()  # and nothing is lost
