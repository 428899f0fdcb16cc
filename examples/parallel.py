"""What the examples on many processes share: the process group, and training with measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from runtime import measure

MORE_STEPS = 20


@dataclass(frozen=True)
class Run:
    """Losses of a training, and the most bytes that its last steps held."""

    losses: tuple[float, ...]
    peak_bytes: int


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Joins the job that `torchrun` started; yields this process's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    device = torch.device(device)
    if cuda:
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        if ours:
            dist.destroy_process_group()


def batches(
    steps: int, shape: tuple[int, int], device: torch.device, rank: int | None = None
) -> list[torch.Tensor]:
    """Random tokens: other ones on each rank, or those of `rank`."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return [torch.randint(0, 512, shape, generator=generator).to(device) for _ in range(steps)]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
    held: tuple[torch.nn.Module, int] | None = None,
    allowed: int | None = None,
) -> Run:
    """Trains for a step per batch, and measures the last three.

    `held` is what the peak counts besides the step's own bytes, if not all of `model`: a module and
    a number of bytes. `allowed`: see `least_peak`.
    """
    losses: list[float] = []

    def step(batch: torch.Tensor) -> None:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for batch in data[:-3]:
        step(batch)
    module, extra = held or (model, 0)
    within = None if allowed is None else allowed - extra
    peak = least_peak(step, data[-3:], module, optimizer, within)
    return Run(tuple(losses[: len(data)]), peak + extra)


def least_peak(
    step: Callable[[torch.Tensor], None],
    data: list[torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    allowed: int | None = None,
) -> int:
    """Runs a step per batch; the least of their peaks in bytes.

    On the CPU torch's profiler does not see a tensor freed by one of gloo's own threads, so a
    measured peak may be too high by a few of them, never too low. On a busy machine that happens in
    most steps. So as long as a rank is above the `allowed` bytes, all take another step.
    """

    def peak(batch: torch.Tensor) -> int:
        run = partial(step, batch)
        return measure(run, model=model, optimizer=optimizer, inputs=batch).peak_bytes

    least = min(map(peak, data))
    for _ in range(MORE_STEPS):
        over = [False] * dist.get_world_size()
        dist.all_gather_object(over, allowed is not None and least > allowed)
        if not any(over):
            break
        least = min(least, peak(data[-1]))
    return least


def compare(
    name: str,
    plain: Run,
    planned: Run,
    budget_bytes: int,
    recomputed: int,
    say: Callable[[str], None] = print,
) -> None:
    """Prints both runs of every rank from rank 0; raises if losses differ or a peak is over."""
    row = {
        "plain": asdict(plain),
        "planned": asdict(planned),
        "budget_bytes": budget_bytes,
        "recomputed": recomputed,
    }
    rows: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        report(name, rows, say)
    if plain.losses != planned.losses:
        raise SystemExit(f"{name}: the losses of rank {dist.get_rank()} differ")
    if planned.peak_bytes > budget_bytes:
        raise SystemExit(f"{name}: rank {dist.get_rank()} held {planned.peak_bytes} bytes")


def report(name: str, rows: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    say(f"{name}: {len(rows)} processes, {len(rows[0]['plain']['losses'])} steps")
    for rank, row in enumerate(rows):
        plain, planned = row["plain"], row["planned"]
        say(
            f"  rank {rank}: loss {plain['losses'][0]:.6f} -> {plain['losses'][-1]:.6f} plain, "
            f"{planned['losses'][-1]:.6f} planned; peak {plain['peak_bytes'] / 1e6:.2f} MB plain, "
            f"{planned['peak_bytes'] / 1e6:.2f} MB planned, of a budget of "
            f"{row['budget_bytes'] / 1e6:.2f} MB; {row['recomputed']} operations run again"
        )
    if path := os.environ.get("PARALLEL_REPORT"):
        with open(path, "a") as file:
            file.write(json.dumps({"name": name, "ranks": rows}) + "\n")
