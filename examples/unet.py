"""A diffusion U-Net within a budget: skips cross the whole step, so that no block stands alone."""

from __future__ import annotations

import argparse
import sys

import torch
from diffusers import UNet2DModel
from torch import nn

from examples.common import compare, settings


class Denoising(nn.Module):
    """The U-Net with its loss: what noise was added to the images?"""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.net = UNet2DModel(
            sample_size=args.pixels,
            in_channels=3,
            out_channels=3,
            layers_per_block=args.layers,
            block_out_channels=(args.width, 2 * args.width),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(self, noisy: torch.Tensor, step: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(noisy, step).sample, noise)


def main() -> int:
    args = settings(__doc__, layers=2, width=64, pixels=64, batch=4).parse_args()
    torch.manual_seed(0)
    noisy, noise = torch.randn(2, args.batch, 3, args.pixels, args.pixels)
    steps = torch.randint(0, 1000, (args.batch,))
    # Torch's traced backward sums some biases over other strides than eager, recomputed or not.
    return compare(Denoising(args).train(), (noisy, steps, noise), args, rounding=1e-7)


if __name__ == "__main__":
    sys.exit(main())
