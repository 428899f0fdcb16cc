"""A vision transformer within a budget."""

from __future__ import annotations

import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

from examples.common import compare, settings


def main() -> int:
    args = settings(__doc__, layers=12, width=384, pixels=224, batch=8).parse_args()
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        intermediate_size=4 * args.width,
        image_size=args.pixels,
        num_labels=10,
    )
    pixels = torch.randn(args.batch, 3, args.pixels, args.pixels)
    labels = torch.randint(0, 10, (args.batch,))
    model = ViTForImageClassification(config).train()
    return compare(model, {"pixel_values": pixels, "labels": labels}, args)


if __name__ == "__main__":
    sys.exit(main())
