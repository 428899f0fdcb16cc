"""Step time of a plan that recomputes nothing, as a ratio to the plain module.

Run with `python -m benchmarks.step_time`. The budget is ample, so what is seen is what the planned
module costs by itself. Both run in one process, in turns; the ratio is of medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import plan
from runtime.measure import median_seconds

AMPLE_GB = 1e6


@dataclass(frozen=True)
class Case:
    layers: int
    hidden: int
    batch: int
    sequence: int
    rounds: int


CASES = {
    "small": Case(layers=6, hidden=256, batch=4, sequence=128, rounds=21),
    "large": Case(layers=6, hidden=1024, batch=1, sequence=256, rounds=7),
    # Kernels so short that the time goes into launching them.
    "launch": Case(layers=12, hidden=128, batch=1, sequence=32, rounds=41),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="instead of each case's own number")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{'case':10}{'plain, ms':>12}{'planned, ms':>13}{'ratio':>8}")
    for name in args.cases:
        case = CASES[name]
        model, batch = build(case, args.device)
        planned_model, _ = build(case, args.device)
        p = plan(planned_model, batch, budget_gb=AMPLE_GB)
        if p.recomputed:
            raise AssertionError(f"{name}: the plan recomputes although nothing needs to be")
        steps = {"plain": step_of(model, batch), "planned": step_of(p.apply(), batch)}
        seconds = median_seconds(steps, args.rounds or case.rounds)
        plain, planned = seconds["plain"] * 1e3, seconds["planned"] * 1e3
        print(f"{name:10}{plain:>12.1f}{planned:>13.1f}{planned / plain:>8.3f}")


if __name__ == "__main__":
    main()
