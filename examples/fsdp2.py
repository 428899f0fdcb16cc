"""Sharded data parallel training with a plan: `torchrun --nproc-per-node 2 -m examples.fsdp2`.

Each block and the root are wrapped by `fully_shard`. The hooks of FSDP2 stay as they are, so the
model is captured in pieces, one for each block; the plan counts the shards, the gathered parameters
of the block that runs and of the one that is prefetched, and the buffers of its collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.parallel import batches, compare, process_group, train
from examples.transformer import Decoder
from planner import Plan, plan

STEPS, SHAPE = 10, (16, 64)


def build(device: torch.device) -> Decoder:
    torch.manual_seed(0)
    model = Decoder().to(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(**options: Any) -> None:
    """`options` are those of `plan`."""
    with process_group() as device:
        data = batches(STEPS, SHAPE, device)

        model = build(device)
        plain = train(model, torch.optim.AdamW(model.parameters()), data)

        model = build(device)
        optimizer = torch.optim.AdamW(model.parameters())
        ample = plan(model, (data[0],), budget_gb=1000, optimizer=optimizer, **options)
        assert isinstance(ample, Plan)
        budget = (ample.baseline_peak_bytes + ample.minimum_peak_bytes) / 2
        made = plan(model, (data[0],), budget_gb=budget / 1e9, optimizer=optimizer, **options)
        assert isinstance(made, Plan)
        made.apply()
        planned = train(model, optimizer, data, allowed=made.budget_bytes)
        compare("FSDP2", plain, planned, made.budget_bytes, len(made.recomputed))


if __name__ == "__main__":
    main()
