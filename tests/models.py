"""Small models for tests, one of each kind that people train; random weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]


def _tokens(batch: int, length: int, vocabulary: int = 500) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def bert(dropout: float = 0.0, layers: int = 2) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=500,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    x = _tokens(2, 64)
    return BertForMaskedLM(config), {"input_ids": x, "labels": x}


def gpt2(dropout: float = 0.0) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=500,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    x = _tokens(2, 64)
    return GPT2LMHeadModel(config), {"input_ids": x, "labels": x}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
    )
    x = _tokens(2, 64)
    return LlamaForCausalLM(config), {"input_ids": x, "labels": x}


def t5(dropout: float = 0.0) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=500,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    x = _tokens(2, 48)
    return T5ForConditionalGeneration(config), {"input_ids": x, "labels": x}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=64,
        patch_size=8,
    )
    pixels = torch.randn(4, 3, 64, 64)
    return ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def resnet() -> Made:
    """ResNet with BatchNorm and bottlenecks, as ResNet-50 but narrower and shallower."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2])
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def unet() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([3, 4])}


MODELS: dict[str, Callable[[], Made]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
}


class Perceptron(nn.Module):
    """Layers of Linear and Tanh with dropout: the smallest thing worth planning."""

    def __init__(self, width: int = 64, depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x
