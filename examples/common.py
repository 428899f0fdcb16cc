"""What the model examples share: arguments, and a plan that is verified on a real step."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from planner import plan


def settings(description: str | None, **sizes: int) -> argparse.ArgumentParser:
    """Arguments for the sizes of a model, and for the budget."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--share",
        type=float,
        default=0.4,
        help="the budget, from 0 (the least possible) to 1 (nothing is recomputed)",
    )
    parser.add_argument("--report", help="write a report to this file")
    return parser


def compare(
    model: torch.nn.Module, batch: Any, args: argparse.Namespace, *, rounding: float = 0.0
) -> int:
    """Plans, prints, and runs one step with and one without the plan; 0 if they agree."""
    ample = plan(model, batch, budget_gb=1000)
    room = ample.baseline_peak_bytes - ample.minimum_peak_bytes
    p = ample.edit(budget_gb=(ample.minimum_peak_bytes + args.share * room) / 1e9)
    print(p)
    if args.report:
        p.report(args.report)
    verified = p.verify(batch)
    print(verified)
    equal = all(difference <= rounding for difference, _ in verified.worst.values())
    return 0 if equal and verified.within_budget else 1
