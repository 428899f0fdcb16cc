"""Model x precision x what people do x backend: gradients as unplanned, peak within the budget.

`GRID=all pytest tests/test_grid.py` runs every combination (about an hour on two cores); by default
each model meets a few of them.
"""

from __future__ import annotations

import copy
import itertools
import os
import zlib
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, plan
from planner.verify import loss_of
from runtime import measure
from tests.test_training import OTHER_KERNEL
from tests.variants import GRID, PRECISIONS, VARIANTS, cast, changed

CALLS = {"accumulation": 4}
# Plain training dies there: torch 2.13's kernel of group norm's backward on CPU reads a null
# pointer when its input, in channels-last strides, needs no gradient.
DIES = [("unet", p, "frozen") for p in PRECISIONS]
COMBINATIONS = [c for c in itertools.product(GRID, PRECISIONS, VARIANTS) if c not in DIES]
# Where torch's traced step rounds otherwise than eager mode, with or without recomputation. An LSTM
# is traced step by step, where eager mode has one kernel for a layer.
ANOTHER_ORDER = [("t5", "bf16"), *itertools.product((*OTHER_KERNEL, "lstm"), PRECISIONS)]
USUAL = {
    "eager": ["bert-fp32-accumulation", "lstm-fp32-tied"],
    "inductor": ["bert-fp32-accumulation"],
}


def cases() -> list[Any]:
    everything = os.environ.get("GRID") == "all"
    return [
        pytest.param(backend, *case, id=f"{backend}-{'-'.join(case)}")
        for backend, usual in USUAL.items()
        for case in COMBINATIONS
        if everything or "-".join(case) in usual
    ]


@pytest.mark.parametrize(("backend", "name", "precision", "variant"), cases())
def test_grid(backend: str, name: str, precision: str, variant: str) -> None:
    torch.manual_seed(zlib.crc32(f"{name}{variant}".encode()))
    model, batch = GRID[name]()
    changed(model, variant).train()
    plain, other, plain64 = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    plain64.double()
    if name == "mixtral":  # its grouped product does not exist in float64
        config: Any = plain64.config
        config._experts_implementation = "eager"
    if variant == "accumulation":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    made = tight(model, batch, precision, backend)
    assert made.recomputed, "the budget forces recomputation"
    want = gradients(plain, batch, precision, variant)
    try:
        made.apply()
        got = gradients(model, batch, precision, variant)
    finally:
        made.remove()
    exact = gradients(plain64, doubled(batch), "fp64", variant) if precision == "bf16" else {}
    for key, expected in want.items():
        if backend == "eager" and (name, precision) not in ANOTHER_ORDER:
            assert torch.equal(got[key], expected), key
        elif precision == "bf16":
            if not as_good(got[key], expected, exact[key]) and backend == "inductor":
                expected = unrecomputed(other, batch, precision, variant)[key]
            assert as_good(got[key], expected, exact[key]), key
        else:
            torch.testing.assert_close(got[key], expected, msg=key)
    assert_within(model, batch, precision, variant, made)


def as_good(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> bool:
    """Torch's own kind of rule for half precision: not three times further off than another.

    That is eager mode, or Inductor without recomputation, whose rounding is its own.
    """
    own, its = (float((t.double() - exact).square().mean().sqrt()) for t in (one, other))
    return own <= 3 * its + 1e-4 * float(exact.double().square().mean().sqrt())


def unrecomputed(
    model: nn.Module, batch: dict[str, Any], precision: str, variant: str
) -> dict[str, torch.Tensor]:
    """What Inductor gives where nothing runs again."""
    if variant == "accumulation":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    with cast(precision):
        wide = plan(model, batch, budget_gb=1000, backend="inductor")
    assert isinstance(wide, Plan) and not wide.recomputed
    wide.apply()
    return gradients(model, batch, precision, variant)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def tight(model: nn.Module, batch: dict[str, Any], precision: str, backend: str) -> Plan:
    """A plan a third of the way from the least peak to that without recomputation."""
    with cast(precision):
        wide = plan(model, batch, budget_gb=1000, backend=backend)
        assert isinstance(wide, Plan)
        budget = wide.minimum_peak_bytes + (wide.peak_bytes - wide.minimum_peak_bytes) / 3
        if not wide.pieces:
            return wide.edit(budget_gb=budget / 1e9, time_limit=2.0)
        made = plan(model, batch, budget_gb=budget / 1e9, backend=backend, time_limit=2.0)
    assert isinstance(made, Plan)
    return made


def step(model: nn.Module, batch: dict[str, Any], precision: str) -> None:
    with cast(precision):
        loss = loss_of(model(**batch))
    loss.backward()


def gradients(
    model: nn.Module, batch: dict[str, Any], precision: str, variant: str
) -> dict[str, torch.Tensor]:
    """Gradients after the variant's calls, and buffers, which moved with them."""
    for _ in range(CALLS.get(variant, 1)):
        step(model, batch, precision)
    if variant == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**found, **dict(model.named_buffers())}


def assert_within(
    model: nn.Module, batch: dict[str, Any], precision: str, variant: str, made: Plan
) -> None:
    """The measured peak of a step that is like those after the first."""
    if variant != "accumulation":
        model.zero_grad(set_to_none=True)
    made.apply()
    try:
        measured = measure(lambda: step(model, batch, precision), model=model, inputs=batch)
    finally:
        made.remove()
    assert measured.peak_bytes <= made.budget_bytes
