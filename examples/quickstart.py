"""Trains BERT within a byte budget that plain training exceeds, and compares the two.

Run with `python examples/quickstart.py`. Weights and tokens are random: nothing is downloaded.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import plan
from runtime import measure

BUDGET_GB = 0.2
STEPS = 8
CONFIG = BertConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=1024,
)

Batch = dict[str, torch.Tensor]


def build_model() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(CONFIG).train()


def build_batch() -> Batch:
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 256), generator=torch.Generator())
    return {"input_ids": tokens, "labels": tokens}


class Training:
    """A training loop as anyone has it, one step at a time."""

    def __init__(self, model: BertForMaskedLM, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        torch.manual_seed(len(self.losses))  # the same dropout in both trainings
        start = time.perf_counter()
        output = self.model(**self.batch)
        output.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(output.loss.item())
        self.seconds.append(time.perf_counter() - start)


def main() -> int:
    batch = build_batch()
    model = build_model()
    p = plan(model, batch, budget_gb=BUDGET_GB, optimizer=torch.optim.AdamW)
    print(p)
    trainings = Training(build_model(), batch), Training(p.apply(), batch)

    for _ in range(STEPS - 1):  # in turns, so that the times can be compared
        for training in trainings:
            training.step()
    times = [statistics.median(t.seconds[1:]) for t in trainings]
    peaks = [measure(t.step, t.model, t.optimizer, batch).peak_bytes for t in trainings]

    plain, planned = (t.losses for t in trainings)
    print(f"\n{'':24}{'plain':>14}{'planned':>14}")
    for number, losses in enumerate(zip(plain, planned, strict=True), start=1):
        print(f"loss of step {number:<11}{losses[0]:>14.6f}{losses[1]:>14.6f}")
    print(f"{'measured peak, GB':24}{peaks[0] / 1e9:>14.3f}{peaks[1] / 1e9:>14.3f}")
    print(f"{'median step, seconds':24}{times[0]:>14.3f}{times[1]:>14.3f}")

    same, within = plain == planned, peaks[1] <= p.budget_bytes < peaks[0]
    print(f"\nThe losses are {'the same' if same else 'DIFFERENT'}. ", end="")
    print(
        f"The budget of {BUDGET_GB} GB was {'kept' if within else 'NOT KEPT, or is no challenge'}."
    )
    return 0 if same and within else 1


if __name__ == "__main__":
    sys.exit(main())
