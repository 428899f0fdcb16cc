"""The command line, through a real subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CHECKPOINT_PLANNER_CACHE": str(cwd / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)\n"
    )
    return tmp_path


def test_plan_save_and_show(folder: Path) -> None:
    made = run("plan", "train:build", "--budget-gb", "1", "--save", "p.json", "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == json.loads((folder / "p.json").read_text())
    shown = run("show", "p.json", cwd=folder)
    assert shown.returncode == 0 and "Checkpoint plan for cpu" in shown.stdout
    costs = run("costs", "show", cwd=folder)
    assert costs.returncode == 0 and "cpu" in costs.stdout.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "train", "--budget-gb", "1"), "MODULE:FUNCTION"),
        (("plan", "nowhere:build", "--budget-gb", "1"), "cannot be imported"),
        (("plan", "train:build", "--budget-gb", "-1"), "budget_gb=-1"),
        (("plan", "train:build", "--budget-gb", "1", "--hardware", "abacus"), "abacus"),
        (("show", "none.json"), "cannot be read"),
        (("costs", "export"), "needs a file"),
    ],
)
def test_bad_input_is_explained(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, cwd=folder)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
