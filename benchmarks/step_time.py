"""Step time of a plan that recomputes nothing, as a ratio to the plain module.

Run with `python -m benchmarks.step_time`. The budget is ample, so what is seen is what the planned
module costs by itself. Both run in one process, in turns. The ratio is the median of each round's
own, as a slow moment of the machine is in both of its times; behind it stands the interval that
holds the true median with 95 % confidence (order statistics of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import plan
from runtime.measure import interleaved_seconds

AMPLE_GB = 1e6


@dataclass(frozen=True)
class Case:
    layers: int
    hidden: int
    batch: int
    sequence: int
    rounds: int


CASES = {
    "small": Case(layers=6, hidden=256, batch=4, sequence=128, rounds=61),
    "large": Case(layers=6, hidden=1024, batch=1, sequence=256, rounds=21),
    # Kernels so short that the time goes into launching them.
    "launch": Case(layers=12, hidden=128, batch=1, sequence=32, rounds=121),
}


def build(case: Case, device: str) -> tuple[BertForMaskedLM, dict[str, torch.Tensor]]:
    config = BertConfig(
        vocab_size=4096,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=max(1, case.hidden // 64),
        intermediate_size=4 * case.hidden,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config).to(device).train()
    tokens = torch.randint(0, 4096, (case.batch, case.sequence), device=device)
    return model, {"input_ids": tokens, "labels": tokens}


def step_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return step


def median_and_interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics around it that hold it with 95 % confidence.

    How many of n values lie below the true median is binomial with probability one half. With
    fewer than six values no two of them hold it that surely: the least and the greatest are given.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    outside, rank = 0.0, 0
    while (outside := outside + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="instead of each case's own number")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{'case':10}{'plain, ms':>12}{'planned, ms':>13}{'ratio':>8}  95 % interval")
    for name in args.cases:
        case = CASES[name]
        model, batch = build(case, args.device)
        planned_model, _ = build(case, args.device)
        p = plan(planned_model, batch, budget_gb=AMPLE_GB)
        if p.recomputed:
            raise AssertionError(f"{name}: the plan recomputes although nothing needs to be")
        steps = {"plain": step_of(model, batch), "planned": step_of(p.apply(), batch)}
        seconds = interleaved_seconds(steps, args.rounds or case.rounds)
        plain, planned = (statistics.median(times) * 1e3 for times in seconds.values())
        ratios = [b / a for a, b in zip(seconds["plain"], seconds["planned"], strict=True)]
        ratio, low, high = median_and_interval(ratios)
        print(f"{name:10}{plain:>12.1f}{planned:>13.1f}{ratio:>8.3f}  ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
