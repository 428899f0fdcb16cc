"""Trains BERT within a byte budget that plain training exceeds, and compares the two.

Run with `python examples/quickstart.py`. Weights and tokens are random: nothing is downloaded.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import plan
from runtime import Measurement, measure

BUDGET_GB = 0.2
STEPS = 6
CONFIG = BertConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=1024,
)

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    losses: list[float]
    seconds: float  # median of the steps between the first and the measured one
    measured: Measurement  # of the last step


def build_model() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(CONFIG).train()


def build_batch() -> Batch:
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 256), generator=torch.Generator())
    return {"input_ids": tokens, "labels": tokens}


def train(model: torch.nn.Module, batch: Batch) -> Training:
    """The training loop as anyone has it; the last step runs under `measure`."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []
    times: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        times.append(time.perf_counter() - start)

    for _ in range(STEPS - 1):
        step()
    measured = measure(step, model, optimizer, batch)
    return Training(losses, statistics.median(times[1:-1]), measured)


def main() -> int:
    batch = build_batch()
    plain = train(build_model(), batch)

    model = build_model()
    p = plan(model, batch, budget_gb=BUDGET_GB, optimizer=torch.optim.AdamW)
    print(p)
    planned = train(p.apply(), batch)

    print(f"\n{'':24}{'plain':>14}{'planned':>14}")
    for number, (a, b) in enumerate(zip(plain.losses, planned.losses, strict=True), start=1):
        print(f"loss of step {number:<11}{a:>14.6f}{b:>14.6f}")
    peaks = plain.measured.peak_bytes, planned.measured.peak_bytes
    print(f"{'measured peak, GB':24}{peaks[0] / 1e9:>14.3f}{peaks[1] / 1e9:>14.3f}")
    print(f"{'median step, seconds':24}{plain.seconds:>14.3f}{planned.seconds:>14.3f}")

    same = plain.losses == planned.losses
    within = peaks[1] <= p.budget_bytes < peaks[0]
    print(
        f"\nlosses are {'the same' if same else 'DIFFERENT'}; the budget of {BUDGET_GB} GB is",
        end=" ",
    )
    print(
        "kept, and plain training exceeds it" if within else "NOT KEPT, or plain training keeps it"
    )
    return 0 if same and within else 1


if __name__ == "__main__":
    sys.exit(main())
