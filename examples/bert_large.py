"""BERT-Large (24 layers, hidden 1024, sequence 512) at 50, 30 and 20 % of its saved activations.

A budget of f is the plain step's peak less (1 - f) of the bytes that it saves for backward. One
`torch.utils.checkpoint` for each layer is measured in the same run. On CPU with two cores this
takes about a quarter of an hour; `--layers`, `--batch` and `--rounds` make it shorter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import Plan, plan
from runtime import measure
from runtime.measure import median_seconds

AMPLE_GB = 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[50, 30, 20], metavar="PERCENT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> BertForMaskedLM:
    config = BertConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.sequence,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config).to(args.device).train()


def budget_bytes(ample: Plan, percent: float) -> int:
    return ample.baseline_peak_bytes - int((1 - percent / 100) * ample.baseline_saved_bytes)


def main() -> int:
    args = arguments()
    model = build_model(args)
    tokens = torch.randint(0, 30000, (args.batch, args.sequence), device=args.device)
    batch = {"input_ids": tokens, "labels": tokens}

    def train() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    def checkpointed() -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        train()
        model.gradient_checkpointing_disable()

    def planned(p: Plan) -> Callable[[], None]:
        def step() -> None:
            p.apply()
            train()
            p.remove()

        return step

    ample = plan(model, batch, budget_gb=AMPLE_GB)
    print(
        f"plain: predicted peak {ample.baseline_peak_bytes / 1e9:.3f} GB, "
        f"of which {ample.baseline_saved_bytes / 1e9:.3f} GB saved for backward"
    )
    plans = {
        f"{percent:g} %": plan(model, batch, budget_gb=budget_bytes(ample, percent) / 1e9)
        for percent in args.budgets
    }
    steps = {"plain": train, "checkpoint per layer": checkpointed}
    steps |= {name: planned(p) for name, p in plans.items()}

    peaks = {}
    for name, step in steps.items():
        step()
        peaks[name] = measure(step, model, inputs=batch).peak_bytes
    seconds = median_seconds(steps, args.rounds)

    print(
        f"\n{'':22}{'budget':>9}{'predicted':>11}{'measured':>10}{'overhead':>10}{'bound':>8}"
        f"{'time':>7}{'solved':>9}\n{'':22}{'GB':>9}{'peak, GB':>11}{'peak, GB':>10}"
        f"{'predicted':>10}{'':>8}{'ratio':>7}{'s':>9}"
    )
    for name in steps:
        ratio = seconds[name] / seconds["plain"]
        if p := plans.get(name):
            print(
                f"{name + ' of saved':22}{p.budget_bytes / 1e9:>9.3f}{p.peak_bytes / 1e9:>11.3f}"
                f"{peaks[name] / 1e9:>10.3f}{p.overhead:>10.2%}{p.lower_bound:>8.2%}{ratio:>7.2f}"
                f"{p.solve_seconds:>9.1f}"
            )
        else:
            print(f"{name:22}{'':>20}{peaks[name] / 1e9:>10.3f}{'':>18}{ratio:>7.2f}")
    kept = all(peaks[name] <= p.budget_bytes for name, p in plans.items())
    print(f"\nevery budget was {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
