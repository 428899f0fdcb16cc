"""The CUDA allocator's rounding, without a device; the figures follow from its source."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner import plan
from tests.models import Perceptron
from tracer.allocator import allocated_bytes, cuda_bytes, expandable_segments
from tracer.residents import optimizer_step_bytes, resident_bytes

MIB = 1 << 20

BLOCKS = [
    (0, 0),
    (1, 512),
    (512, 512),
    (513, 1024),
    (3 * MIB + 1, 3 * MIB + 512),  # shares a segment of 20 MiB
    (10 * MIB, 10 * MIB),  # a segment of its own, filled
    (11 * MIB, 12 * MIB),  # 1 MiB is left, which is not cut off
    (11 * MIB - 512, 11 * MIB - 512),  # a little more than 1 MiB is: it is cut off
    (101 * MIB + 1, 102 * MIB),
    (100 * MIB + 1, 100 * MIB + 512),
]


@pytest.mark.parametrize(("nbytes", "block"), BLOCKS)
def test_blocks(nbytes, block):
    assert cuda_bytes(nbytes) == block


@pytest.mark.parametrize(("nbytes", "_"), BLOCKS)
def test_expandable_segments_cut_every_block_to_size(nbytes, _):
    assert cuda_bytes(nbytes, expandable=True) == -(-nbytes // 512) * 512


def test_blocks_hold_the_request_and_grow_with_it():
    requests = range(0, 24 * MIB, 7919)
    sizes = [cuda_bytes(n) for n in requests]
    assert sizes == sorted(sizes)
    assert all(n <= size <= n + MIB + 512 for n, size in zip(requests, sizes, strict=True))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_settings(settings, expected):
    assert expandable_segments(settings) is expected


def test_the_cpu_counts_what_was_asked_for():
    assert allocated_bytes(12345, "cpu") == 12345


def test_a_plan_for_a_card_counts_blocks():
    """Every value, parameter and gradient of a few bytes is a block of 512 bytes."""
    model, x = Perceptron(4, 3), torch.rand(2, 4)
    made = plan(model, x, budget_gb=1, hardware="l4-24gb", optimizer=torch.optim.AdamW)
    parts = dict(made.breakdown)
    tensors = len(list(model.parameters()))
    assert parts["parameters"] == 512 * tensors
    assert parts["inputs"] == 512
    assert made.saved_bytes % 512 == 0 and made.saved_bytes > 0


def test_the_optimizer_of_a_card_updates_all_parameters_at_once():
    """What `step()` needs is that of the device planned for, not of the one the model waits on."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="meta") for _ in range(8)))
    x = torch.empty(1, 256, device="meta")
    made = plan(model, x, budget_gb=1, hardware="l4-24gb", optimizer=torch.optim.AdamW)
    cuda = optimizer_step_bytes(
        model, torch.optim.AdamW, torch.device("cuda"), allocated=cuda_bytes
    )
    assert cuda >= 8 * 256 * 256 * 4
    held = dict(resident_bytes(model, x, torch.optim.AdamW, allocated=cuda_bytes))
    gradients = 8 * 256 * 256 * 4
    assert made.peak_bytes >= sum(held.values()) + gradients + cuda
