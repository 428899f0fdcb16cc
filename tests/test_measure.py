"""`runtime.measure` against sizes that are known, and against the operating system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.step_time import median_and_interval
from runtime import measure
from runtime.measure import MALLOC_ENV, median_seconds, process_peak

ROOT = Path(__file__).resolve().parent.parent
MB = 1 << 20


def block(megabytes: int = 1) -> torch.Tensor:
    return torch.empty(megabytes * MB, dtype=torch.uint8)


def test_a_matrix_product_adds_its_result() -> None:
    x, w = torch.randn(256, 512), torch.randn(512, 1024)
    result = measure(lambda: x @ w)
    assert result.added_bytes == 256 * 1024 * 4
    assert result.peak_bytes == result.added_bytes
    assert result.seconds > 0
    assert result.reserved_bytes == 0


def test_the_peak_is_of_what_is_alive_together() -> None:
    def step() -> None:
        a = block(4)
        del a
        kept = block(1), block(2)
        del kept
        block(3)

    assert measure(step).added_bytes == 4 * MB


def test_nothing_is_added_by_a_step_that_allocates_nothing() -> None:
    assert measure(lambda: None).added_bytes == 0


def test_a_backward_pass_by_hand() -> None:
    x = torch.randn(64, 1024)
    w = torch.nn.Parameter(torch.randn(1024, 2048))
    g = torch.randn(64, 2048)

    def step() -> None:
        (x @ w).backward(g)

    # Freed before backward starts or not, the product is smaller than the gradient.
    small, gradient = 64 * 2048 * 4, 1024 * 2048 * 4
    added = measure(step).added_bytes
    assert gradient <= added <= gradient + small
    # The second time the new gradient stands beside the old one before it is added to it.
    assert measure(step).added_bytes == added


def test_given_objects_count_once() -> None:
    layer = torch.nn.Linear(100, 200, bias=False)
    tied = torch.nn.ModuleList([layer, torch.nn.Linear(100, 200, bias=False)])
    tied[1].weight = layer.weight
    tied.register_buffer("table", layer.weight.detach()[:50])
    result = measure(lambda: None, model=tied, inputs=layer.weight)
    assert result.peak_bytes == 100 * 200 * 4


def test_gradients_optimizer_state_and_inputs_are_held() -> None:
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64)
    model(x).sum().backward()
    parameters = (64 * 32 + 32) * 4
    optimizer.step()
    counters = 2 * 4  # AdamW's step, one for each parameter
    held = 4 * parameters + counters + 8 * 64 * 4
    assert measure(lambda: None, model, optimizer, {"x": [x]}).peak_bytes == held
    assert measure(lambda: None, optimizer=optimizer).peak_bytes == held - 8 * 64 * 4


def test_inputs_in_containers() -> None:
    @dataclass
    class Batch:
        first: torch.Tensor
        rest: tuple[torch.Tensor, ...]
        name: str = "batch"

    inputs = {"batch": Batch(block(1), (block(2), block(3))), "more": [block(4)], "n": 5}
    assert measure(lambda: None, inputs=inputs).peak_bytes == 10 * MB


def test_a_sparse_input_holds_indices_and_values() -> None:
    sparse = torch.eye(10).to_sparse()
    assert measure(lambda: None, inputs=sparse).peak_bytes == 10 * 2 * 8 + 10 * 4


def test_freeing_what_a_given_object_held_counts_down() -> None:
    holder = torch.nn.Module()
    holder.register_buffer("old", block(8))

    def step() -> None:
        del holder.old
        block(6)
        holder.register_buffer("old", block(9))

    result = measure(step, holder)
    assert result.added_bytes == 1 * MB
    assert result.peak_bytes == 9 * MB


def test_gradients_dropped_in_the_step_count_down() -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)
    x = torch.randn(4, 1024)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    step()
    first, second = measure(step, model, inputs=x), measure(step, model, inputs=x)
    gradient = 1024 * 1024 * 4
    assert 0 < first.added_bytes < 0.1 * gradient
    assert 2 * gradient < first.peak_bytes < 2.1 * gradient
    assert second.peak_bytes == first.peak_bytes


def test_a_freeing_that_the_profiler_reports_counts_once() -> None:
    holder = torch.nn.Module()

    def step() -> None:
        holder.register_buffer("old", None)
        holder.register_buffer("old", block(8))
        block(2)

    results = [measure(step, holder) for _ in range(3)]
    assert [r.peak_bytes for r in results] == 3 * [10 * MB]
    assert [r.added_bytes for r in results] == [10 * MB, 2 * MB, 2 * MB]


def test_a_view_keeps_a_given_storage_alive() -> None:
    holder = torch.nn.Module()
    old = block(8)
    holder.register_buffer("old", old)
    views = [old[:1]]
    del old

    def step() -> None:
        del holder.old
        block(2)
        views.clear()
        block(9)

    assert measure(step, holder).added_bytes == 2 * MB


def test_the_step_is_called_once() -> None:
    calls: list[int] = []
    measure(lambda: calls.append(1))
    assert calls == [1]


def test_an_error_in_the_step_comes_through_and_leaves_no_profiler_behind() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(step)
    assert measure(lambda: block(1)).added_bytes == MB


def test_other_devices_are_refused() -> None:
    class Elsewhere(torch.nn.Module):
        def parameters(self, recurse=True):
            return iter([Tensor()])

    class Tensor(torch.Tensor):
        device = torch.device("xpu", 0)

    with pytest.raises(ValueError, match="cannot measure on xpu:0"):
        measure(lambda: None, Elsewhere())


def test_times_are_taken_in_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    steps = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    assert list(median_seconds(steps, rounds=2)) == ["a", "b"]
    assert "".join(calls) == "abbaab"
    with pytest.raises(ValueError, match="at least 1"):
        median_seconds(steps, rounds=0)


def test_interval_of_a_median() -> None:
    values = [float(n) for n in (7, 3, 10, 1, 9, 2, 8, 4, 6, 5)]
    # At most one of ten is below the median in 11 of 1024 cases (1.1 %), at most two in 56 (5.5 %).
    assert median_and_interval(values) == (5.5, 2, 9)
    assert median_and_interval([3.0, 1.0, 2.0]) == (2, 1, 3)


def test_process_peak_needs_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    with pytest.raises(RuntimeError, match="MALLOC_TRIM_THRESHOLD_=65536"):
        process_peak(lambda: None)


BERT = """
import json, torch
from runtime import measure
from runtime.measure import process_peak
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                    intermediate_size=1024, vocab_size=4000)
model = BertForMaskedLM(config)
ids = torch.randint(0, 4000, (4, 256))

def step():
    model(input_ids=ids, labels=ids).loss.backward()

step(), step()
print(json.dumps([process_peak(step), measure(step).added_bytes, process_peak(step)]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_profiler_and_the_process_agree_on_bert() -> None:
    env = {**os.environ, **MALLOC_ENV, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BERT], env=env, capture_output=True, text=True, check=True
    )
    first, profiler, second = json.loads(done.stdout)
    assert profiler > 100 * MB
    assert first == pytest.approx(profiler, rel=0.01)
    assert second == pytest.approx(profiler, rel=0.01)
    assert "profiler_start" not in done.stderr
