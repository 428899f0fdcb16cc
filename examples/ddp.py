"""Data parallel training with a plan: `torchrun --nproc-per-node 2 -m examples.ddp`.

Trains the same model twice, without and with a plan, and compares losses and peaks. The plan may be
made before the module is wrapped or after; DDP's gradient buckets count towards the budget.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from examples.parallel import batches, compare, process_group, train
from examples.transformer import Decoder
from planner import Plan, plan

STEPS, SHAPE = 10, (4, 64)


def build(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Decoder(tied=True).to(device)
    return DistributedDataParallel(model, bucket_cap_mb=1)


def main(**options: Any) -> None:
    """`options` are those of `plan`."""
    with process_group() as device:
        data = batches(STEPS, SHAPE, device)

        model = build(device)
        plain = train(model, torch.optim.AdamW(model.parameters()), data, held(model))

        model = build(device)
        optimizer = torch.optim.AdamW(model.parameters())
        ample = plan(model, (data[0],), budget_gb=1000, optimizer=optimizer, **options)
        assert isinstance(ample, Plan)
        budget = ample.baseline_peak_bytes - 0.6 * ample.baseline_saved_bytes
        made = plan(model, (data[0],), budget_gb=budget / 1e9, optimizer=optimizer, **options)
        assert isinstance(made, Plan)
        made.apply()
        planned = train(model, optimizer, data, held(model), made.budget_bytes)
        compare("DDP", plain, planned, made.budget_bytes, len(made.recomputed))


def held(model: DistributedDataParallel) -> tuple[torch.nn.Module, int]:
    """The buckets belong to no tensor that Python sees."""
    return model, sum(p.numel() * p.element_size() for p in model.parameters())


if __name__ == "__main__":
    main()
