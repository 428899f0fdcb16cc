"""A small decoder for the examples that run on many processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1: under tensor parallelism each rank has some of the heads.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), MLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    """Returns the loss of predicting each next token."""

    def __init__(
        self,
        vocabulary: int = 512,
        hidden: int = 128,
        layers: int = 4,
        heads: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
