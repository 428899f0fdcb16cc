"""BERT-Large (24 layers, hidden 1024, sequence 512) at 50, 30 and 20 % of its saved activations.

A budget of f is the plain step's measured peak less (1 - f) of the bytes that it was seen to save
for backward. One `torch.utils.checkpoint` for each layer is measured in the same run, and a plan at
the peak that it reaches. Gradients are allocated all the time, as when they accumulate: otherwise
the least budget would be that of the end of the step, where all gradients exist. On CPU with two
cores this takes about a quarter of an hour; `--layers`, `--batch` and `--rounds` make it shorter.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM

from planner import InfeasibleBudget, plan
from runtime import measure
from runtime.measure import median_seconds

Batch = dict[str, torch.Tensor]
Step = Callable[[], None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[50, 30, 20], metavar="PERCENT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.sequence,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config).to(args.device).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step_of(model: BertForMaskedLM, batch: Batch) -> Step:
    def step() -> None:
        output = model(**batch)
        output.loss.backward()
        model.zero_grad(set_to_none=False)

    return step


def saved_bytes(step: Step, model: BertForMaskedLM, batch: Batch) -> int:
    """Bytes of the storages that autograd saves in a plain step, parameters and inputs left out."""
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor  # and so no storage is freed, and no address used twice, before backward

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(saved.values())


def checkpointed_step_of(model: BertForMaskedLM, batch: Batch) -> Step:
    """A step with one `torch.utils.checkpoint` for each layer, which is undone after it."""
    train = step_of(model, batch)
    layers = model.bert.encoder.layer

    def step() -> None:
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        train()
        for layer in layers:
            del layer.forward

    return step


def main() -> int:
    args = arguments()
    # Two models with the same weights, so that plain and planned steps can be timed in turns.
    model, planned = build_model(args), build_model(args)
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.sequence), device=args.device)
    batch = {"input_ids": tokens, "labels": tokens}
    plain = step_of(model, batch)

    def compare(name: str, step: Step, owner: BertForMaskedLM) -> int:
        """Prints measured peak, and time in turns with the plain step; returns the peak."""
        step()
        peak = measure(step, owner, inputs=batch).peak_bytes
        seconds = median_seconds({"plain": plain, "this": step}, args.rounds)
        ratio = seconds["this"] / seconds["plain"]
        print(f"{name:25}{peak / 1e9:>10.3f}{seconds['this']:>9.2f}{ratio:>8.2f}", end="")
        return peak

    print(f"{'':25}{'peak, GB':>10}{'seconds':>9}{'ratio':>8}{'predicted:':>13} ", end="")
    print(f"{'peak, GB':>9}{'overhead':>10}{'bound':>8}{'solved in, s':>14}")
    plain_peak = compare("plain", plain, model)
    saved = saved_bytes(plain, model, batch)
    print(f"   saves {saved / 1e9:.3f} GB")
    checkpoint_peak = compare("checkpoint per layer", checkpointed_step_of(model, batch), model)
    print()

    budgets = {f"{f:g} %": plain_peak - int((1 - f / 100) * saved) for f in args.budgets}
    kept = True
    for name, budget in (budgets | {"as checkpoint": checkpoint_peak}).items():
        label = f"{name}: {budget / 1e9:.3f} GB"
        try:
            p = plan(planned, batch, budget_gb=budget / 1e9)
        except InfeasibleBudget as error:
            print(f"{label:25}   the least feasible budget is {error.minimum_bytes / 1e9:.3f} GB")
            continue
        p.apply()
        kept &= compare(label, step_of(planned, batch), planned) <= budget
        p.remove()
        print(f"{p.peak_bytes / 1e9:>23.3f}{p.overhead:>10.2%}{p.lower_bound:>8.2%}", end="")
        print(f"{p.solve_seconds:>14.1f}", flush=True)
    print(f"every budget was {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
