"""Batches of changing sizes: few captures, within the budget, gradients as without a plan."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from planner import Plan, PlannerError, StalePlan, plan
from planner.solving import solve
from runtime import measure
from tests.captured import captures
from tests.models import bert
from tracer import torch_private

GB = 1e9


class Tower(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(nn.functional.gelu(up(x))))
        return x.square().mean()


def train(model: nn.Module, **batch: torch.Tensor) -> None:
    model.zero_grad()
    result = model(**batch)
    (result if isinstance(result, torch.Tensor) else result.loss).backward()


def equal_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(
        p.grad is q.grad or (p.grad is not None and q.grad is not None and p.grad.equal(q.grad))
        for p, q in pairs
    )


def test_changing_sizes_are_captured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tower()
    plain = copy.deepcopy(model)
    found = captures(monkeypatch)
    wide = plan(model, {"x": torch.randn(512, 32)}, budget_gb=1)
    budget = (wide.minimum_peak_bytes + wide.baseline_peak_bytes) // 2
    found.clear()
    made = plan(model, {"x": torch.randn(512, 32)}, budget_gb=budget / GB)
    made.apply()
    for rows in (512, 400, 500, 33, 257, 399, 512, 64, 300):
        x = torch.randn(rows, 32)
        for each in (model, plain):
            train(each, x=x)
        assert equal_gradients(model, plain), rows
        model.zero_grad()
        assert measure(partial(train, model, x=x), model, inputs=x).peak_bytes <= budget
    assert len(found) == 2  # the first size as it is, then any size


def test_larger_sizes_are_planned_within_the_budget() -> None:
    torch.manual_seed(0)
    model = Tower()
    wide = plan(model, {"x": torch.randn(600, 32)}, budget_gb=1)
    budget = wide.minimum_peak_bytes
    plan(model, {"x": torch.randn(300, 32)}, budget_gb=budget / GB).apply()
    for rows in (300, 400, 600):
        x = torch.randn(rows, 32)
        train(model, x=x)
        model.zero_grad()
        assert measure(partial(train, model, x=x), model, inputs=x).peak_bytes <= budget
    assert isinstance(model.plan, Plan) and model.plan.recomputed


def test_a_range_planned_ahead_needs_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = bert(dropout=0.0)
    plain = copy.deepcopy(model)
    length = batch["input_ids"].shape[1]
    small = {k: v[:, : length // 2].contiguous() for k, v in batch.items()}
    wide = plan(model, batch, budget_gb=1)
    found = captures(monkeypatch)
    dynamic: dict[str | int, dict[int, int]] = {name: {1: length} for name in batch}
    made = plan(model, small, budget_gb=wide.minimum_peak_bytes * 1.1 / GB, dynamic=dynamic)
    assert 0.9 < made.baseline_peak_bytes / wide.baseline_peak_bytes < 1.1
    made.apply()
    for part in (length, length // 2, length - 3, 5):
        cut = {k: v[:, :part].contiguous() for k, v in batch.items()}
        for each in (model, plain):
            train(each, **cut)
        assert equal_gradients(model, plain), part
        model.zero_grad()
        measured = measure(partial(train, model, **cut), model, inputs=cut).peak_bytes
        assert measured <= made.budget_bytes
    assert len(found) == 1
    assert getattr(model, "plan", None) is made


class Noting(Tower):
    """Notes in its first forward what later ones look at, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            self.kind = "mean"
        return super().forward(x)


def test_what_is_captured_again_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captures(monkeypatch)
    solved = Mock(side_effect=solve)
    monkeypatch.setattr("planner.engine.solve", solved)
    x = torch.randn(256, 32)
    wide = plan(Noting(), (x,), budget_gb=1)
    model, twin = Noting(), Noting()
    twin.load_state_dict(model.state_dict())
    budget = (wide.minimum_peak_bytes + wide.peak_bytes) / 2 / GB
    made = plan(model, (x,), budget_gb=budget)
    assert isinstance(wide, Plan) and isinstance(made, Plan) and made.recomputed
    made.apply()
    for _ in range(3):
        train(model, x=x)
        train(twin, x=x)
        assert equal_gradients(model, twin)
    assert model.kind == "mean"
    assert len(found) == 4  # planned by position twice, called by name, and with the note
    assert solved.call_count == 2


def test_dynamic_that_makes_no_sense() -> None:
    model, x = Tower(), torch.randn(8, 32)
    with pytest.raises(PlannerError, match=r"dynamic='y' names no tensor.*'x'"):
        plan(model, x, budget_gb=1, dynamic={"y": {0: 9}})
    with pytest.raises(PlannerError, match=r"the example has shape \(8, 32\)"):
        plan(model, x, budget_gb=1, dynamic={"x": {0: 7}})


def test_two_hundred_steps_do_not_grow() -> None:
    torch.manual_seed(0)
    model = Tower(16, 1)
    plan(model, {"x": torch.randn(256, 16)}, budget_gb=0.01).apply()
    alive = []
    for number in range(200):
        train(model, x=torch.randn(2 + 37 * number % 41, 16))
        model.zero_grad()
        if number in (100, 199):
            gc.collect()
            alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert alive[1] <= alive[0] * 1.02, alive


class Steps(nn.Module):
    """What runs hangs on an attribute, which a capture takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for _ in range(self.times):
            x = x.sin()
        return x.square().mean()


def test_more_graphs_than_torch_holds(monkeypatch):
    """Torch holds eight by default, and more while we capture; then they are captured again."""
    monkeypatch.setattr(torch_private, "GRAPHS", 10)
    model, x = Steps(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    plan(model, x, budget_gb=1).apply()
    for times in (*range(12), 3):
        plain.times = model.times = times
        train(model, x=x)
        train(plain, x=x)
        assert equal_gradients(model, plain)


def test_a_plan_that_was_read_outlives_other_sizes(tmp_path: Path) -> None:
    """Once a size has changed, torch captures graphs of open sizes, also for the planned one."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 32), torch.randn(20, 32)
    path = tmp_path / "plan.json"
    plan(Tower(), x, budget_gb=1).save(path)
    model = Tower()
    plain = copy.deepcopy(model)
    made = Plan.load(path, model)
    made.apply()
    for batch in (x, y, x):
        for each in (model, plain):
            train(each, x=batch)
        assert equal_gradients(model, plain)
    assert made.verify(x).bitwise
    made.remove()
    made.apply()
    train(model, x=x)
    planned: Any = model.plan
    assert planned is made


def test_a_plan_that_was_read_waits_for_its_size(tmp_path: Path) -> None:
    x = torch.randn(64, 32)
    path = tmp_path / "plan.json"
    plan(Tower(), x, budget_gb=1).save(path)
    made = Plan.load(path, model := Tower())
    made.apply()
    for _ in range(2):
        with pytest.raises(StalePlan, match="another graph"):
            model(x[:20])
    train(model, x=x)
    planned: Any = model.plan
    assert planned is made
