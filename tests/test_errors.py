"""Bad input gets a clear error that names the argument, the cause and the way out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner import (
    InfeasibleBudget,
    InvalidBudget,
    Plan,
    PlannerError,
    StalePlan,
    UnknownHardware,
    UntraceableModel,
    plan,
)
from tests.models import Perceptron


@pytest.fixture
def model() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron(32, 4)


X = torch.randn(128, 32)


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), "much", True, None, 32e9])
def test_invalid_budget(model: nn.Module, budget: Any) -> None:
    with pytest.raises(InvalidBudget, match="budget_gb="):
        plan(model, X, budget_gb=budget)


def test_not_a_module() -> None:
    with pytest.raises(PlannerError, match=r"not a torch\.nn\.Module"):
        plan(torch.tanh, X, budget_gb=1)  # type: ignore[call-overload]


def test_nothing_to_train(model: nn.Module) -> None:
    model.requires_grad_(False)
    with pytest.raises(PlannerError, match="no parameter that needs a gradient"):
        plan(model, X, budget_gb=1)


def test_inputs_that_forward_rejects(model: nn.Module) -> None:
    with pytest.raises(PlannerError, match="forward fails for these inputs") as caught:
        plan(model, torch.randn(3, 5), budget_gb=1)
    assert "models.py" in str(caught.value)
    with pytest.raises(PlannerError, match=r"does not fit Perceptron\.forward.*missing.*'x'"):
        plan(model, {"nonsense": X}, budget_gb=1)


@pytest.mark.parametrize("pieces", [False, True])
def test_training_raises_what_the_model_raises(pieces: bool) -> None:
    aside = torch.compiler.disable(lambda: None)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if pieces:
                aside()
            if len(x) > 50:
                raise KeyError("too long")
            y: torch.Tensor = self.layers(x)
            return y

    torch.manual_seed(0)
    net = Normed()
    plain = copy.deepcopy(net)
    plan(net, torch.randn(8, 4), budget_gb=1).apply()
    for size in (8, 1, 60, 7, 8):
        x = torch.randn(size, 4)
        for each in (net, plain):
            each.zero_grad()
            if size in (1, 60):
                with pytest.raises(ValueError if size == 1 else KeyError):
                    each(x)
            else:
                each(x).square().mean().backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert p.grad is q.grad or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_list_is_one_argument(model: nn.Module) -> None:
    """A data loader makes lists of its tensors."""
    with pytest.raises(UntraceableModel, match="pass a tuple"):
        plan(model, [X, X], budget_gb=1)  # type: ignore[call-overload]
    with pytest.raises(PlannerError, match=r"missing.*pass a tuple"):
        plan(nn.Bilinear(32, 32, 4), [X, X], budget_gb=1)  # type: ignore[call-overload]


def test_devices_mixed(model: nn.Module) -> None:
    """The message is torch's sentence and the lines of the forward, not its advice on compiling."""
    with pytest.raises(
        PlannerError, match=r"same device, but found at least two|found two different devices"
    ) as caught:
        plan(model, X.to("meta"), budget_gb=1)
    assert len(str(caught.value).splitlines()) <= 4


def test_inputs_given_twice(model: nn.Module) -> None:
    with pytest.raises(PlannerError, match="example_kwargs"):
        plan(model, {"x": X}, example_kwargs={"x": X}, budget_gb=1)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        if h.sum() > 0:  # depends on data
            return h
        return -h


def test_untraceable_model_names_the_line() -> None:
    with pytest.raises(UntraceableModel, match=r"test_errors\.py.*line \d+") as caught:
        plan(Branching(), X, budget_gb=1)
    assert "if h.sum() > 0" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none(model: nn.Module) -> None:
    with pytest.raises(UnknownHardware, match="no CUDA device"):
        plan(model, X, budget_gb=1, device="cuda")


def test_unknown_hardware(model: nn.Module) -> None:
    with pytest.raises(UnknownHardware, match="a100-80gb"):
        plan(model, X, budget_gb=1, hardware="a100-81gb")


def test_unknown_solver_backend_and_time_limit(model: nn.Module) -> None:
    with pytest.raises(PlannerError, match="solver='best' is not one of 'auto'"):
        plan(model, X, budget_gb=1, solver="best")
    with pytest.raises(PlannerError, match="backend='fast'"):
        plan(model, X, budget_gb=1, backend="fast")
    with pytest.raises(PlannerError, match="time_limit"):
        plan(model, X, budget_gb=1, time_limit=0)


def test_pattern_that_matches_nothing(model: nn.Module) -> None:
    with pytest.raises(PlannerError, match=r"keep='layer\.0' matches no module.*layers\.0"):
        plan(model, X, budget_gb=1, keep="layer.0")
    with pytest.raises(PlannerError, match="recompute='decoder' matches no module"):
        plan(model, X, budget_gb=1, recompute=["decoder"])


def test_the_minimum_works_and_one_percent_less_does_not(model: nn.Module) -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        plan(model, X, budget_gb=1e-9)
    error = caught.value
    assert error.minimum_bytes > error.budget_bytes == 1
    assert error.limiting and f"{error.minimum_bytes / 1e9:.9f}" in str(error)
    made = plan(model, X, budget_gb=error.minimum_bytes / 1e9)
    assert isinstance(made, Plan)
    assert made.peak_bytes <= error.minimum_bytes
    check = made.verify(X)
    assert check.bitwise and check.within_budget, check
    with pytest.raises(InfeasibleBudget):
        plan(model, X, budget_gb=error.minimum_bytes * 0.99 / 1e9)
    again = pickle.loads(pickle.dumps(error))
    assert (again.budget_bytes, again.minimum_bytes) == (1, error.minimum_bytes)


def test_optimizer_state_counts(model: nn.Module) -> None:
    without = plan(model, X, budget_gb=1)
    by_class = plan(model, X, budget_gb=1, optimizer=torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters())
    by_object = plan(model, X, budget_gb=1, optimizer=optimizer)
    assert isinstance(without, Plan) and isinstance(by_class, Plan) and isinstance(by_object, Plan)
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert dict(by_class.breakdown)["optimizer state"] >= state
    assert by_class.peak_bytes == by_object.peak_bytes >= without.peak_bytes + state


def test_plan_files(model: nn.Module, tmp_path: Path) -> None:
    made = plan(model, X, budget_gb=1)
    assert isinstance(made, Plan)
    path = tmp_path / "plan.json"
    made.save(path)
    loaded = Plan.load(path)
    assert loaded == made and str(loaded) == str(made)
    with pytest.raises(PlannerError, match="knows no model"):
        loaded.apply()
    loaded.apply(model)
    model(X).sum().backward()

    text = path.read_text()
    for damaged, message in [
        (text[: len(text) // 2], "not valid JSON"),
        ("[]", "not a plan file"),
        (text.replace('"version": 1', '"version": 99'), "version 99"),
        (text.replace('"order"', '"disorder"'), "damaged"),
    ]:
        path.write_text(damaged)
        with pytest.raises(PlannerError, match=message):
            Plan.load(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_a_plan_of_another_model(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan(model, X, budget_gb=1)
    assert isinstance(made, Plan)
    made.save(path)
    other = Perceptron(32, 5)
    Plan.load(path).apply(other)
    with pytest.raises(StalePlan, match="another graph"):
        other(X)


def test_every_error_is_a_planner_error() -> None:
    for name in ("InfeasibleBudget", "InvalidBudget", "StalePlan", "UnknownHardware"):
        assert issubclass(getattr(planner, name), PlannerError)


def test_meta_model_needs_hardware() -> None:
    with torch.device("meta"):
        model, x = Perceptron(32, 4), torch.empty(64, 32)
    with pytest.raises(PlannerError, match="hardware="):
        plan(model, x, budget_gb=1)
    made = plan(model, x, budget_gb=1, hardware="a100-80gb")
    assert isinstance(made, Plan) and "A100" in made.device
