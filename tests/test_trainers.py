"""Planned modules inside trainers, unchanged and through the callbacks."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from planner import InfeasibleBudget, Plan, PlannerError, plan
from tests.models import gpt2

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")


# Priced from a profile: nothing is measured, which would take longer than the training.
FAST: dict[str, Any] = {"hardware": "cpu", "solver": "greedy"}


def tokens(count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (32,), generator=generator) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


def tight_gb(model: nn.Module, batch: Any, **options: Any) -> float:
    """A budget that forces recomputation where gradients exist already."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    wide = plan(model, batch, budget_gb=1000, **FAST, **options)
    model.zero_grad()
    assert isinstance(wide, Plan)
    saved = wide.baseline_peak_bytes - 0.5 * wide.baseline_saved_bytes
    return max(saved, wide.minimum_peak_bytes) / 1e9


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def hf_train(model: nn.Module, folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_grad_norm=1.0,
        seed=0,
        **arguments,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=tokens(16), callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize("how", ["callback", "applied"])
def test_hugging_face(how: str, tmp_path: Path) -> None:
    """Parameters after training equal those of the plain trainer; the plan is in the log."""
    from planner.integrations.hf import PlanCallback

    torch.manual_seed(0)
    model, _ = gpt2()
    twin = copy.deepcopy(model)
    batch = {k: torch.stack([t[k] for t in tokens(2)]) for k in ("input_ids", "labels")}
    budget = tight_gb(model, batch, optimizer=torch.optim.AdamW)
    hf_train(twin, tmp_path, [], gradient_accumulation_steps=2)
    if how == "callback":
        trainer = hf_train(
            model, tmp_path, [PlanCallback(budget_gb=budget, **FAST)], gradient_accumulation_steps=2
        )
        rows = [r for r in trainer.state.log_history if "plan/peak_gb" in r]
        assert len(rows) == 2  # gradients exist from the second micro-batch on
        assert all(0 < r["plan/peak_gb"] <= budget for r in rows)
        assert rows[-1]["plan/recomputed_operations"] > 0
        assert not hasattr(model, "plan")  # taken away after training
    else:
        made = plan(model, batch, budget_gb=budget, optimizer=torch.optim.AdamW, **FAST)
        made.apply()
        hf_train(model, tmp_path, [], gradient_accumulation_steps=2)
        assert isinstance(model.plan, Plan)
    assert same_parameters(model, twin)


def test_hugging_face_refuses(tmp_path: Path) -> None:
    from planner.integrations.hf import PlanCallback

    with pytest.raises(PlannerError, match="budget_gb= is missing"):
        PlanCallback()
    with pytest.raises(PlannerError, match="first batch of the training"):
        PlanCallback(budget_gb=1, example_inputs=())
    with pytest.raises(InfeasibleBudget):
        hf_train(gpt2()[0], tmp_path, [PlanCallback(budget_gb=1e-6, **FAST)])


def accelerate_train(model: nn.Module, precision: str, context: Any) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(tokens(), batch_size=2)  # type: ignore[arg-type]
    prepared: Any
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    with context(accelerator, prepared, optimizer):
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    from contextlib import nullcontext

    from planner.integrations.accelerate import Planned

    torch.manual_seed(0)
    model, _ = gpt2()
    twin = copy.deepcopy(model)
    batch = {k: torch.stack([t[k] for t in tokens(2)]) for k in ("input_ids", "labels")}
    budget = tight_gb(model, batch)
    plans: list[Any] = []

    class Watched(Planned):
        def _log(self, made: Plan) -> None:
            plans.append(made)
            super()._log(made)

    with caplog.at_level(logging.INFO, logger="planner.integrations.accelerate"):
        accelerate_train(
            model, precision, lambda a, m, o: Watched(a, m, o, budget_gb=budget, **FAST)
        )
    accelerate_train(twin, precision, lambda *_: nullcontext())
    assert plans and plans[-1].recomputed
    assert "Checkpoint plan" in caplog.text
    assert same_parameters(model, twin)
    assert not hasattr(model, "plan")


class Lit(lightning.LightningModule):  # type: ignore[name-defined]
    """Calls a submodule in `training_step`, as most do."""

    def __init__(self, own_forward: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
        self.own_forward = own_forward

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        out = self(batch) if self.own_forward else self.model(batch)
        loss: torch.Tensor = out.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class LitForward(Lit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result


def lightning_train(module: Any, callbacks: list[Any], folder: Path) -> Any:
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(64, generator=generator) for _ in range(256)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=callbacks,
            logger=lightning.loggers.CSVLogger(str(folder)),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        trainer.fit(module, DataLoader(data, batch_size=64))  # type: ignore[arg-type]
    return trainer


@pytest.mark.parametrize("kind", [Lit, LitForward])
def test_lightning(kind: Any, tmp_path: Path) -> None:
    from planner.integrations.lightning import PlanCallback

    torch.manual_seed(0)
    module = kind(own_forward=kind is LitForward)
    twin = copy.deepcopy(module)
    budget = tight_gb(module.model, torch.randn(64, 64), optimizer=torch.optim.AdamW)
    trainer = lightning_train(module, [PlanCallback(budget_gb=budget, **FAST)], tmp_path)
    lightning_train(twin, [], tmp_path / "plain")
    rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "plan/peak_gb" in rows[0]
    assert same_parameters(module, twin)
    assert not hasattr(module, "plan") and not hasattr(module.model, "plan")


def test_lightning_needs_to_know_what_to_plan(tmp_path: Path) -> None:
    from planner.integrations.lightning import PlanCallback

    module = Lit()
    module.second = nn.Linear(2, 2)
    with pytest.raises(PlannerError, match="say which one"):
        lightning_train(module, [PlanCallback(budget_gb=1)], tmp_path)
    with pytest.raises(PlannerError, match="module='modle'"):
        lightning_train(module, [PlanCallback("modle", budget_gb=1)], tmp_path)
