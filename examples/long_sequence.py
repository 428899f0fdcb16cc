"""One long sequence: activations grow with its length, and `fit` says how long it may be.

Attention is torch's fused one, which keeps no square of the length; what fills the device are the
activations of the layers around it.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from examples.common import compare, settings
from planner import fit, plan


class Layer(nn.Module):
    """A transformer's layer with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.mix(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        mixed: torch.Tensor = x + self.feed(self.norms[1](x))
        return mixed


def main() -> int:
    parser = settings(__doc__, layers=4, width=128, length=2048)
    parser.add_argument("--most", type=int, default=8192, help="the longest sequence to look at")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(args.width) for _ in range(args.layers)]).train()

    failed = compare(model, torch.randn(1, args.length, args.width), args)

    peak = model_peak_gb(model, args.length, args.width)
    found = fit(
        model,
        lambda length: torch.empty(1, length, args.width),
        budget_gb=peak,
        over="sequence",
        multiple=64,
        most=args.most,
        points=3,
        hardware="a100-80gb",
    )
    print(f"\nIn the memory that {args.length} positions take without recomputation:\n{found}")
    return failed


def model_peak_gb(model: nn.Module, length: int, width: int) -> float:
    """What the step needs without recomputation, with the costs of the hardware profile."""
    ample = plan(model, torch.empty(1, length, width), budget_gb=1000, hardware="a100-80gb")
    return ample.baseline_peak_bytes / 1e9


if __name__ == "__main__":
    sys.exit(main())
