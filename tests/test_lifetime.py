"""A model that nobody holds any more is freed, planned or not: torch remembers no part of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner import Plan, plan
from tests.models import Perceptron


class Printing(nn.Module):
    """Captured in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch.compiler.disable(print)(end="")
        result: torch.Tensor = self.second(x).square().mean()
        return result


def planned(model: nn.Module, x: torch.Tensor, backend: str = "eager") -> Plan:
    made = plan(model, x, budget_gb=1, backend=backend)
    assert isinstance(made, Plan)
    return made


def only_planned(model: nn.Module, x: torch.Tensor) -> None:
    planned(model, x)


def applied(model: nn.Module, x: torch.Tensor) -> None:
    planned(model, x).apply()


def trained(model: nn.Module, x: torch.Tensor) -> None:
    planned(model, x).apply()
    model(x).sum().backward()


def trained_on_other_sizes(model: nn.Module, x: torch.Tensor) -> None:
    planned(model, x).apply()
    for size in (len(x), len(x) - 1, len(x) // 2):
        model(x[:size]).sum().backward()


def compiled(model: nn.Module, x: torch.Tensor) -> None:
    planned(model, x, "inductor").apply()
    model(x).sum().backward()


def removed(model: nn.Module, x: torch.Tensor) -> None:
    made = planned(model, x)
    made.apply()
    model(x).sum().backward()
    made.remove()


@pytest.mark.parametrize(
    "use", [only_planned, applied, trained, trained_on_other_sizes, compiled, removed]
)
def test_a_deleted_model_is_freed(use: Callable[[nn.Module, torch.Tensor], None]) -> None:
    assert freed_after(use, lambda: Perceptron(8, 6))


def test_a_deleted_model_in_pieces_is_freed() -> None:
    assert freed_after(trained, Printing)


def freed_after(
    use: Callable[[nn.Module, torch.Tensor], None], make: Callable[[], nn.Module]
) -> bool:
    model = make()
    use(model, torch.randn(6, 8))
    watched = weakref.ref(model)
    del model
    gc.collect()
    return watched() is None


def test_backward_when_the_model_is_gone() -> None:
    torch.manual_seed(0)
    model, x = Perceptron(8, 6), torch.randn(6, 8)
    weights = list(model.parameters())
    model(x).square().mean().backward()
    expected = [w.grad for w in weights]
    model.zero_grad()
    planned(model, x).apply()
    loss = model(x).square().mean()
    del model
    gc.collect()
    loss.backward()
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None and gradient is not None
        assert torch.equal(weight.grad, gradient)
