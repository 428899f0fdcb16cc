"""Tensor parallel training with a plan: `torchrun --nproc-per-node 2 -m examples.tensor_parallel`.

Attention heads and the MLP are split over the ranks with DTensor; the plan covers this rank's part.
The all-reduces stand in the captured graph, and no plan ever runs one of them again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from examples.parallel import batches, compare, process_group, train
from examples.transformer import Decoder
from planner import Plan, plan

STEPS, SHAPE = 10, (4, 64)


def build(device: torch.device) -> Decoder:
    torch.manual_seed(0)
    model = Decoder().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        styles = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, styles)
    return model


def main(**options: Any) -> None:
    """`options` are those of `plan`."""
    with process_group() as device:
        # Every rank of a tensor-parallel group sees the same tokens.
        data = batches(STEPS, SHAPE, device, rank=0)

        model = build(device)
        plain = train(model, torch.optim.AdamW(model.parameters(), foreach=False), data)

        model = build(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ample = plan(model, (data[0],), budget_gb=1000, optimizer=optimizer, **options)
        assert isinstance(ample, Plan)
        budget = ample.baseline_peak_bytes - 0.6 * ample.baseline_saved_bytes
        made = plan(model, (data[0],), budget_gb=budget / 1e9, optimizer=optimizer, **options)
        assert isinstance(made, Plan)
        made.apply()
        planned = train(model, optimizer, data, allowed=made.budget_bytes)
        compare("tensor parallel", plain, planned, made.budget_bytes, len(made.recomputed))


if __name__ == "__main__":
    main()
