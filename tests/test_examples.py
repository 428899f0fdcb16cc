"""The examples and benchmarks run, small, as a user would run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMMANDS = {
    "quickstart": "examples/quickstart.py",
    "linear_tanh": "examples/linear_tanh.py --narrow 64 --wide 512 --batch 64 --rounds 1",
    "bert_large": (
        "examples/bert_large.py --layers 4 --hidden 128 --sequence 128 --vocabulary 512 "
        "--budgets 60 40 --rounds 1"
    ),
    "what_fits": (
        "examples/what_fits.py --size tiny --sequence 32 --vocabulary 128 --budget-gb 0.03"
    ),
    "step_time": "-m benchmarks.step_time launch --rounds 1",
}


def run(command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_runs(command: str) -> None:
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
