"""Llama with LoRA adapters within a budget: only the adapters train, most activations stay.

The base weights are frozen, so gradients and optimizer state are small and the activations fill the
device: the case in which a plan helps most. The adapters are written out here; those of peft are
modules like any other and work the same way.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.common import compare, settings


class Lora(nn.Module):
    """A frozen linear layer and a trained correction of low rank (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corrected: torch.Tensor = self.base(x) + self.up(self.down(x))
        return corrected


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        num_key_value_heads=max(1, args.width // 64),
        vocab_size=args.vocabulary,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Lora(base, args.rank))
    return model.train()


def main() -> int:
    parser = settings(__doc__, layers=8, width=512, length=256, batch=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.length))
    return compare(build(args), {"input_ids": tokens, "labels": tokens}, args)


if __name__ == "__main__":
    sys.exit(main())
