"""The models that the planner is measured on: no weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from benchmarks.zoo import Made, images, text
from planner.engine import Engine
from planner.frontier import prepare
from planner.request import Inputs, Request
from tracer.graph import ComputationGraph


def graph_of(name: str, hardware: str) -> ComputationGraph:
    """The step of a model, priced for a hardware profile; no gradients before the step."""
    with torch.device("meta"):
        model, batch = MODELS[name]()
    engine = Engine(model.train(), Request(1, hardware=hardware))
    return prepare(engine, Inputs(kwargs=batch)).problem.graph


def bert_large(**options: Any) -> Made:
    config = hf.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        **options,
    )
    return text(hf.BertForMaskedLM(config), 8, 512, 30522)


def gpt2_medium() -> Made:
    config = hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    return text(hf.GPT2LMHeadModel(config), 4, 1024, 50257)


def llama_8() -> Made:
    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return text(hf.LlamaForCausalLM(config), 4, 2048, 32000)


def t5_large() -> Made:
    config = hf.T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return text(hf.T5ForConditionalGeneration(config), 4, 512, 32128)


def vit_large() -> Made:
    config = hf.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return images(hf.ViTForImageClassification(config), 16, 224)


def swin() -> Made:
    return images(hf.SwinForImageClassification(hf.SwinConfig()), 16, 224)


def resnet(depths: tuple[int, ...]) -> Made:
    config = hf.ResNetConfig(num_labels=1000, depths=list(depths))
    return images(hf.ResNetForImageClassification(config), 32, 224)


def unet() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(128, 256, 384, 512),
    )
    return model, {"sample": torch.randn(8, 3, 64, 64), "timestep": torch.arange(8)}


def mixtral_small() -> Made:
    """Eight experts, two for each token, computed by grouped matrix products."""
    config = hf.MixtralConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    return text(hf.MixtralForCausalLM(config), 8, 1024, 32000)


class _Dense(nn.Module):
    """A dense block (Huang et al. 2017, 1608.06993): every layer reads all layers before it."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth),
                nn.ReLU(),
                nn.Conv2d(channels + i * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """DenseNet-121 with its loss."""

    def __init__(self, depths: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        for i, depth in enumerate(depths):
            parts.append(_Dense(channels, depth, growth))
            channels += depth * growth
            parts += [nn.BatchNorm2d(channels), nn.ReLU()]
            if i + 1 < len(depths):
                parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(channels, 1000)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.features(pixel_values).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


def densenet() -> Made:
    return images(DenseNet(), 32, 224)


MODELS: dict[str, Callable[[], Made]] = {
    "bert-large": lambda: bert_large(attn_implementation="eager"),
    "bert-large-fused": lambda: bert_large(
        attention_probs_dropout_prob=0.0, attn_implementation="sdpa"
    ),
    "gpt2-medium": gpt2_medium,
    "llama-8": llama_8,
    "t5-large": t5_large,
    "vit-large": vit_large,
    "swin": swin,
    "resnet-50": lambda: resnet((3, 4, 6, 3)),
    "resnet-152": lambda: resnet((3, 8, 36, 3)),
    "unet": unet,
    "densenet-121": densenet,
    "mixtral-8": mixtral_small,
}
