"""A small net of wide layers: plain, one `torch.utils.checkpoint` for each block, and a plan.

Linear 1024 -> 10240, then three blocks of Linear 10240 -> 10240 and Tanh, batch 512. The plan gets
the peak of the checkpointed step, rounded up to a megabyte, as its budget. Needs 7 GB of memory.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from planner import plan
from runtime import measure
from runtime.measure import median_seconds


class Net(torch.nn.Module):
    """The net; `checkpointed` says whether each block recomputes its inside in backward."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(narrow, wide)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Tanh()) for _ in range(3)
        )
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def step_of(model: Net, x: torch.Tensor, *, checkpointed: bool = False) -> Callable[[], None]:
    def step() -> None:
        model.checkpointed = checkpointed
        model.zero_grad()
        model(x).backward()

    return step


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--narrow", type=int, default=1024)
    parser.add_argument("--wide", type=int, default=10240)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    net = Net(args.narrow, args.wide)
    planned = copy.deepcopy(net)
    x = torch.randn(args.batch, args.narrow)

    steps = {"plain": step_of(net, x)}
    peaks = {"plain": measure(steps["plain"], net, inputs=x).peak_bytes}
    expected = [g.clone() for g in gradients(net)]

    steps["checkpoint per block"] = step_of(net, x, checkpointed=True)
    peaks["checkpoint per block"] = measure(steps["checkpoint per block"], net, inputs=x).peak_bytes
    same = {"plain": True, "checkpoint per block": all(map(torch.equal, gradients(net), expected))}

    megabytes = math.ceil(peaks["checkpoint per block"] / 1e6)
    p = plan(planned, x, budget_gb=megabytes / 1e3)
    print(p)
    p.apply()
    steps["planned"] = step_of(planned, x)
    steps["planned"]()
    peaks["planned"] = measure(steps["planned"], planned, inputs=x).peak_bytes
    same["planned"] = all(map(torch.equal, gradients(planned), expected))
    del expected

    seconds = median_seconds(steps, args.rounds)
    print(f"\n{'':22}{'peak, GB':>10}{'seconds':>10}{'ratio':>8}  gradients")
    for name in steps:
        print(
            f"{name:22}{peaks[name] / 1e9:>10.3f}{seconds[name]:>10.2f}"
            f"{seconds[name] / seconds['plain']:>8.2f}"
            f"  {'equal to plain, bitwise' if same[name] else 'DIFFERENT'}"
        )
    return 0 if all(same.values()) and peaks["planned"] <= p.budget_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
