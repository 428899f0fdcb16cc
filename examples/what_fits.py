"""The largest batch of BERT that fits a V100 with 32 GB, without recomputation and with.

The table of the article on BERT recomputation, from a hardware profile: nothing is run, no GPU is
needed. FACTOR is how many times larger the article's batch became; the curve has that point, too.
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import BertConfig, BertForMaskedLM

from planner import fit

SIZES = {"tiny": (2, 64), "base": (12, 768), "large": (24, 1024)}
MASKED = 0.15
FACTOR = {128: 562 / 93, 512: 120 / 28}


class Pretraining(torch.nn.Module):
    """BERT with the masked-language-model loss on the masked positions only, as in the article."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.model = BertForMaskedLM(config)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.model.bert(tokens).last_hidden_state.flatten(0, 1)
        scores = self.model.cls(hidden[positions])
        return torch.nn.functional.cross_entropy(scores, labels)


def build(args: argparse.Namespace) -> Pretraining:
    layers, hidden = SIZES[args.size]
    config = BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, args.sequence),
        attn_implementation=args.attention,
    )
    with torch.device("meta"):
        return Pretraining(config).to(getattr(torch, args.dtype)).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="large")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--optimizer", default="AdamW", help="a class in torch.optim")
    parser.add_argument("--hardware", default="v100-32gb")
    parser.add_argument("--budget-gb", type=float, help="the device less a reserve, if left out")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        shapes = (batch, args.sequence), (masked * batch,), (masked * batch,)
        return tuple(torch.zeros(shape, dtype=torch.long, device="meta") for shape in shapes)

    masked = round(MASKED * args.sequence)

    found = fit(
        build(args),
        inputs,
        budget_gb=args.budget_gb or "auto",
        hardware=args.hardware,
        optimizer=getattr(torch.optim, args.optimizer),
        points=lambda plain, largest: sizes(args.sequence, plain, largest),
        time_limit=args.time_limit,
    )
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)


def sizes(sequence: int, plain: int, largest: int) -> list[int]:
    """Of the curve: without recomputation, at the article's factor, and in between."""
    factor = FACTOR.get(sequence, 4.0)
    return [round(plain * f) for f in (1, factor**0.5, factor)] + [largest]


if __name__ == "__main__":
    main()
