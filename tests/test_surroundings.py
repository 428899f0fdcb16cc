"""What happens to a planned module from outside: hooks put on it later, transforms, settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner import Plan, PlannerError, UntraceableModel, plan
from runtime import measure
from tests.models import Perceptron
from tests.test_training import assert_same, tighter, train


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def planned(room: float = 0.4) -> tuple[nn.Module, nn.Module, torch.Tensor, Plan]:
    """A planned module, its plain twin, a batch, and the plan."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(128, 64)
    twin = copy.deepcopy(model)
    wide = plan(model, x, budget_gb=1)
    assert isinstance(wide, Plan)
    made = tighter(wide, room)
    assert made.recomputed or room > 1
    made.apply()
    return model, twin, x, made


def assert_trains_alike(model: nn.Module, twin: nn.Module, x: torch.Tensor) -> None:
    for each in (model, twin):
        each.zero_grad()
        train(each, x)
    assert_same(model, twin)


def on_a_layer(model: nn.Module) -> Any:
    return model.get_submodule("layers.1").register_forward_hook(lambda *a: a[-1] * 2)


def before_a_layer(model: nn.Module) -> Any:
    hook = lambda module, args: (args[0] * 0.5,)  # noqa: E731
    return model.get_submodule("layers.2").register_forward_pre_hook(hook)


def on_the_model(model: nn.Module) -> Any:
    return model.register_forward_hook(lambda *a: a[-1] + 1)


def backward(model: nn.Module) -> Any:
    hook = lambda module, into, outof: (into[0] * 3,)  # noqa: E731
    return model.get_submodule("layers.3").register_full_backward_hook(hook)


@pytest.mark.parametrize("put", [on_a_layer, before_a_layer, on_the_model, backward])
def test_hooks_put_on_after_planning_run(put: Callable[[nn.Module], Any]) -> None:
    """And no longer when they are removed."""
    model, twin, x, _ = planned(4.0)
    if put is not on_a_layer:  # that one is there before the first step
        assert_trains_alike(model, twin, x)
    handles = [put(each) for each in (model, twin)]
    assert_trains_alike(model, twin, x)
    for handle in handles:
        handle.remove()
    assert_trains_alike(model, twin, x)


def test_hooks_of_all_modules_run() -> None:
    model, twin, x, _ = planned(4.0)
    assert_trains_alike(model, twin, x)
    double = lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert_trains_alike(model, twin, x)
    finally:
        handle.remove()
    assert_trains_alike(model, twin, x)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
def test_the_plan_runs_under_every_stance(stance: str) -> None:
    """What `torch.compiler.set_stance` says about other code does not undo a plan."""
    model, twin, x, made = planned()
    with torch.compiler.set_stance(stance):
        for y in (x, x[:50]):
            assert_trains_alike(model, twin, y)
            model.zero_grad()
            step = partial(train, model, y)
            assert measure(step, model, inputs=y).peak_bytes <= made.budget_bytes


def test_capture_switched_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x, _ = planned()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(UntraceableModel, match=r"torch\.compile is switched off"):
        plan(Perceptron(8, 2), torch.randn(2, 8), budget_gb=1)
    with pytest.raises(UntraceableModel, match=r"torch\.compile is switched off"):
        model(x)


def test_transforms_are_refused() -> None:
    model, _, x, made = planned()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, values, (x,))
        return out.sum()

    with pytest.raises(PlannerError, match=r"torch\.func .* plan\.remove\(\)"):
        torch.func.grad(loss)(parameters)
    with pytest.raises(PlannerError, match=r"torch\.func .* plan\.remove\(\)"):
        torch.func.vmap(model)(x)
    with forward.dual_level(), pytest.raises(PlannerError, match="forward mode"):
        model(forward.make_dual(x, torch.ones_like(x)))
    with torch.no_grad():
        torch.func.vmap(model)(x)  # nothing to plan
    made.remove()
    torch.func.grad(loss)(parameters)


def test_a_checkpoint_around_it_is_refused() -> None:
    model, twin, x, _ = planned()
    x.requires_grad_()
    out = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(PlannerError, match=r"inside torch\.utils\.checkpoint, leave that out"):
        out.sum().backward()
    for each in (model, twin):  # the older kind runs it twice, which is right and slow
        each.zero_grad()
        checkpoint(each, x, use_reentrant=True).square().mean().backward()
    assert_same(model, twin)


def test_a_part_with_a_plan_of_its_own_is_named() -> None:
    model, x = Blocks(), torch.randn(8, 64)
    part = plan(model.layers[1], x, budget_gb=1)
    part.apply()
    with pytest.raises(PlannerError, match=r"model\.layers\.1 has a plan of its own: remove it"):
        plan(model, x, budget_gb=1)
    part.remove()
    plan(model, x, budget_gb=1)
