"""The benchmarks behind the tables in docs/: on a small model, and what needs no device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import fidelity, on_device
from benchmarks.fidelity_table import document, peak_outside, time_outside
from benchmarks.zoo import ZOO, Entry


class Small(nn.Module):
    """Large values and small parameters, with a loss; in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made.float().square().mean()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        return Small(), {"x": torch.rand(4096, 64)}

    entries = {"small": Entry("small", build), "half": Entry("half", build, torch.bfloat16)}
    monkeypatch.setattr(fidelity, "ZOO", entries)
    monkeypatch.setattr(on_device, "ZOO", entries)
    return ["--turns", "1", "--time-limit", "1", "--results", str(tmp_path / "rows.json")]


@pytest.mark.parametrize(("name", "gradients"), [("small", "dropped"), ("half", "allocated")])
def test_predicted_peaks_are_within_the_limits(small, name, gradients):
    args = fidelity.arguments([name, *small])
    rows = fidelity.measured_rows(name, gradients, args)
    assert [r["budget"] for r in rows] == ["none", "half", "tight"]
    assert not any(peak_outside(r) for r in rows), rows
    peaks = [r["measured_peak"] for r in rows]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.9 * peaks[0]
    assert rows[-1]["recomputed"] and not rows[0]["recomputed"]
    assert all(r["measured_seconds"] > 0 for r in rows)
    assert "torch" in document(rows)


TURN = {"predicted": 1.0, "measured": 1.0, "overhead": 0.1, "measured_overhead": 0.1}


def row(**changed: Any) -> dict[str, Any]:
    whole = {
        **{"model": "m", "title": "M", "gradients": "dropped", "budget": "none"},
        **{"predicted_peak": 1000, "measured_peak": 1000, "environment": {"device": "d"}},
        **{"predicted_seconds": 1.0, "measured_seconds": 1.0, "time_off": 0.0, "turns": [TURN]},
        **{"overhead": 0.1, "measured_overhead": 0.1},
    }
    return {**whole, **changed}


def test_limits_of_the_peak():
    outside = {r: peak_outside(row(predicted_peak=r)) for r in (994, 996, 1009, 1011)}
    assert outside == {994: True, 996: False, 1009: False, 1011: True}


def test_limits_of_time_and_overhead():
    assert not time_outside(row(time_off=0.04, measured_overhead=0.119))
    assert time_outside(row(time_off=0.06))
    assert time_outside(row(time_off=-0.06))
    assert time_outside(row(measured_overhead=0.121))


def test_the_middle_turn_counts():
    """A machine that became slower between two turns moves neither ratio."""
    turns = [TURN | {"predicted": p, "measured": m} for p, m in ((1, 1), (2, 2), (1.5, 1))]
    found = fidelity.summed_up(turns)
    assert found["time_off"] == 0 and found["overhead"] == 0.1


def test_rows_outside_are_bold_and_counted():
    text = document([row(), row(title="Low", predicted_peak=900), row(failed="no graph")])
    assert "2 rows, 1 outside" in text
    assert "| **Low** |" in text and "| M |" in text and "no graph" in text


def test_rows_of_one_model_replace_its_older_ones(tmp_path):
    path = tmp_path / "rows.json"
    fidelity.keep(path, [row(title="old"), row(title="old", budget="half")])
    fidelity.keep(path, [row(gradients="allocated", title="other")])
    fidelity.keep(path, [row(title="new")])
    assert path.read_text().count('"old"') == 0
    assert path.read_text().count('"title"') == 2


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", None),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090-24gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("cpu", None),
    ],
)
def test_the_profile_of_a_device(device, profile):
    assert on_device.profile_for(device) == profile


def test_a_profile_is_compared_with_measured_costs(small):
    text = on_device.profile_section(["small"], "cpu", 1, "cpu")
    assert "aten.addmm.default" in text and "median ratio" in text


def test_every_model_of_the_zoo_has_a_name_of_its_own():
    assert len({e.title for e in ZOO.values()}) == len(ZOO)


def test_larger_batches_keep_their_structure():
    model, batch = ZOO["gpt2"].build()
    _, larger = Entry("x", lambda: (model, batch)).make("cpu", copies=2)
    assert larger["input_ids"] is larger["labels"]
    assert len(larger["input_ids"]) == 2 * len(batch["input_ids"])


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    docs = Path(__file__).resolve().parent.parent / "docs"
    rows = json.loads((docs / "fidelity.json").read_text())
    assert (docs / "fidelity.md").read_text() == fidelity.page(rows)
