"""Two processes with gloo on loopback: values, peaks, one plan for all, and ranks that die.

One start of torchrun runs every check of `tests/ranks.py`; the tests look at its results.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
import torch.distributed as dist

from planner import InfeasibleBudget, Plan, plan
from planner import distributed as sharing
from tests.models import Perceptron

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of one run, also where workers share these tests: who comes second waits and reads."""
    temporary = tmp_path_factory.getbasetemp()
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    with filelock.FileLock(shared / "ranks.lock"):
        folder = shared / "ranks"
        if not (folder / "results.json").exists():
            _run_ranks(folder)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    lines = (folder / "examples.jsonl").read_text().splitlines()
    return found | {(row := json.loads(line))["name"]: row["ranks"] for line in lines}


def _run_ranks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.ranks", str(folder / "results.json")],
        cwd=ROOT,
        env={**ENVIRONMENT, "PARALLEL_REPORT": str(folder / "examples.jsonl")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "results.json").exists(), done.stdout + done.stderr


def ranks(results: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    rows = results[name]
    for row in rows:
        assert "error" not in row, row["error"]
    return rows


@pytest.mark.parametrize("name", ["DDP", "tensor parallel", "FSDP2", "pipeline"])
def test_ten_steps_as_unplanned(name: str, results: Any) -> None:
    """The losses of ten steps are those of the unplanned run, bit for bit, within the budget."""
    ranks(results, f"example {name.lower().replace(' ', '_')}")
    for row in ranks(results, name):
        assert len(row["plain"]["losses"]) == 10
        assert row["planned"]["losses"] == row["plain"]["losses"]
        assert row["recomputed"] > 0
        assert row["planned"]["peak_bytes"] <= row["budget_bytes"] < row["plain"]["peak_bytes"]


@pytest.mark.parametrize("name", ["ddp first", "ddp first, views", "planned first"])
def test_ddp_in_any_order(name: str, results: Any) -> None:
    """Tied and unused parameters; the buckets are part of the peak."""
    for row in ranks(results, name):
        assert row["same"]
        assert row["recomputed"] > 0
        assert row["peak"] <= row["budget"]
        assert row["buckets"] > 0


def test_buckets_overlap_with_backward(results: Any) -> None:
    for row in ranks(results, "overlap"):
        assert row["before"] >= 2  # reduced before the first layer's gradient was there
        assert row["buckets"] > row["before"]


def test_one_plan_with_other_costs(results: Any) -> None:
    first, second = ranks(results, "other cache")
    assert first == second
    assert first["recomputed"] > 0


def test_every_rank_is_told_that_it_does_not_fit(results: Any) -> None:
    first, second = ranks(results, "infeasible")
    assert first["minimum"] == second["minimum"]


def test_ranks_may_have_shapes_of_their_own(results: Any) -> None:
    assert all(row["same"] for row in ranks(results, "uneven"))


def test_sharded_after_the_plan(results: Any) -> None:
    for row in ranks(results, "sharded after"):
        assert row["same"]
        assert row["pieces"] == 2
        assert row["held"]["gathered parameters"] > 0


def test_refusals(results: Any) -> None:
    for row in ranks(results, "refusals"):
        assert "fully_shard" in row["fsdp1"]
        assert "DistributedDataParallel" in row["dp"]


DIES = """
import os, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from planner import plan
from tests.models import Perceptron
dist.init_process_group("gloo")
model = DistributedDataParallel(Perceptron())
batch = torch.randn(8, 64)
plan(model, (batch,), budget_gb=1, hardware="cpu", solver="greedy").apply()
for step in range(100):
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(batch).square().sum().backward()
"""


def test_a_dead_rank_ends_the_other(tmp_path: Path) -> None:
    """With torch's own error, and without a hang of ours."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIES],
            cwd=ROOT,
            env={**ENVIRONMENT, **job, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[1] for process in started]
    assert started[1].returncode == -signal.SIGKILL, said[1]
    assert started[0].returncode not in (0, -signal.SIGKILL)
    assert "gloo" in said[0] and "RuntimeError" in said[0], said[0]


# The store that ranks share plans through, in one process.

HASH_STORE: Any = vars(dist)["HashStore"]  # torch's stubs leave it out


def board(store: Any, rank: int) -> sharing._Board:
    return sharing._Board(store, "key", rank)


def made() -> Plan:
    model = Perceptron(width=8, depth=2)
    found = plan(model, torch.randn(2, 8), budget_gb=1, hardware="cpu", solver="greedy")
    assert isinstance(found, Plan)
    return found


def test_first_claim_makes_the_plan() -> None:
    store, first = HASH_STORE(), made()
    assert board(store, 0).claim()
    assert not board(store, 1).claim()
    board(store, 0).publish(lambda: first)
    taken = board(store, 1).wait()
    assert taken is not None and taken == first


def test_failure_is_shared_where_it_is_everybodys() -> None:
    store = HASH_STORE()
    board(store, 0).claim()

    def fails() -> Plan:
        raise InfeasibleBudget(1, 2, (("what", 3),))

    with pytest.raises(InfeasibleBudget):
        board(store, 0).publish(fails)
    with pytest.raises(InfeasibleBudget, match="what"):
        board(store, 1).wait()


def test_nobody_waits_for_a_silent_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SILENCE", 0.2)
    store = HASH_STORE()
    board(store, 0).claim()
    start = time.monotonic()
    other = board(store, 1)
    other.claim()
    assert other.wait() is None
    assert time.monotonic() - start < 60
