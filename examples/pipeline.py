"""Pipeline parallel training with a plan: `torchrun --nproc-per-node 2 -m examples.pipeline`.

The decoder is cut into one stage for each rank, and runs with one forward, one backward in turn.
An early stage holds more micro-batches at one time than a late one, so each stage has a plan of its
own for the same budget per rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from examples.parallel import Run, batches, compare, least_peak, process_group
from examples.transformer import Block
from planner import Plan, plan

STEPS, MICRO, SHAPE, HIDDEN, VOCABULARY = 10, 4, (16, 64), 128, 512


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(device: torch.device) -> nn.Sequential:
    """This rank's stage."""
    torch.manual_seed(0)
    first, last = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    blocks: list[nn.Module] = [Block(HIDDEN, 4) for _ in range(4)]
    rank, size = dist.get_rank(), dist.get_world_size()
    own = blocks[len(blocks) * rank // size : len(blocks) * (rank + 1) // size]
    own = [first, *own] if rank == 0 else own
    own = [*own, nn.LayerNorm(HIDDEN), last] if rank == size - 1 else own
    return nn.Sequential(*own).to(device)


def example(device: torch.device) -> torch.Tensor:
    """One micro-batch of this stage's inputs."""
    rows, columns = SHAPE[0] // MICRO, SHAPE[1]
    if dist.get_rank() == 0:
        return torch.zeros(rows, columns, dtype=torch.int64, device=device)
    return torch.zeros(rows, columns, HIDDEN, device=device, requires_grad=True)


def buffers() -> int:
    """What torch's pipeline keeps besides the stage, which no plan of a stage can see.

    For each micro-batch the tensors to receive into, forward and backward, and its loss.
    """
    micro = SHAPE[0] // MICRO * SHAPE[1] * HIDDEN * 4
    return MICRO * (2 * micro + 64)


def train(
    stage: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
    allowed: int | None = None,
) -> Run:
    rank, size = dist.get_rank(), dist.get_world_size()
    pipe = PipelineStage(stage, rank, size, data[0].device)
    schedule = Schedule1F1B(pipe, MICRO, loss_fn=loss_of)
    losses: list[float] = []

    def step(batch: torch.Tensor) -> None:
        found: list[torch.Tensor] = []
        given = [batch] if rank == 0 else []
        more: Any = {"target": batch, "losses": found} if rank == size - 1 else {}
        schedule.step(*given, **more, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(loss.detach()) for loss in found) / MICRO)

    for batch in data[:-3]:
        step(batch)
    peak = least_peak(step, data[-3:], stage, optimizer, allowed)
    return Run(tuple(losses[: len(data)]), peak)


def main(**options: Any) -> None:
    """`options` are those of `plan`."""
    with process_group() as device:
        data = batches(STEPS, SHAPE, device, rank=0)

        stage = build(device)
        plain = train(stage, torch.optim.AdamW(stage.parameters()), data)

        stage = build(device)
        optimizer = torch.optim.AdamW(stage.parameters())
        options["in_flight"] = dist.get_world_size() - dist.get_rank()
        ample = plan(stage, (example(device),), budget_gb=1000, optimizer=optimizer, **options)
        assert isinstance(ample, Plan)
        budget = (ample.baseline_peak_bytes + ample.minimum_peak_bytes) / 2
        made = plan(
            stage, (example(device),), budget_gb=budget / 1e9, optimizer=optimizer, **options
        )
        assert isinstance(made, Plan)
        made.apply()
        allowed = made.budget_bytes + buffers()
        planned = train(stage, optimizer, data, allowed)
        compare("pipeline", plain, planned, allowed, len(made.recomputed))


if __name__ == "__main__":
    main()
