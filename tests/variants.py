"""What people do to a model before they train it, for `tests/test_grid.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tests.models import Made, bert, gpt2, llama, resnet, t5, unet


class Recurrent(nn.Module):
    """An LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.lstm(self.words(tokens))[0]).flatten(0, 1), tokens.flatten()
        )


def lstm() -> Made:
    return Recurrent(), {"tokens": torch.randint(0, 100, (8, 12))}


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=200,
        output_router_logits=True,
    )
    x = torch.randint(0, 200, (2, 32))
    return MixtralForCausalLM(config), {"input_ids": x, "labels": x}


GRID: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "mixtral": mixtral,
}
PRECISIONS = ("fp32", "bf16")
VARIANTS = ("plain", "accumulation", "clipping", "tied", "frozen", "lora")


def cast(precision: str) -> AbstractContextManager[Any]:
    """Autocast as a captured step has it: a weight that is used twice is cast twice.

    With its cache, eager mode casts it once, which rounds the sum of its gradients.
    """
    if precision != "bf16":
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def changed(model: nn.Module, variant: str) -> nn.Module:
    """The model as the variant wants it, in place."""
    if variant == "tied":
        _tie(model)
    elif variant == "frozen":
        parameters = list(model.parameters())
        for p in parameters[: len(parameters) // 2]:
            p.requires_grad_(False)
    elif variant == "lora":
        for p in model.parameters():
            p.requires_grad_(False)
        _adapt(model)
    return model


def _tie(model: nn.Module) -> None:
    """Makes two modules with weights of one shape share them, if none do already."""
    modules = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv2d, nn.Embedding)]
    pairs = list(itertools.combinations(modules, 2))
    if any(one.weight is other.weight for one, other in pairs):
        return
    for one, other in pairs:
        if one.weight.shape == other.weight.shape:
            other.weight = one.weight
            return
    recurrent = next(m for m in model.modules() if isinstance(m, nn.LSTM))
    recurrent.weight_ih_l1 = recurrent.weight_ih_l0


class Adapted(nn.Module):
    """A frozen layer and a trained path of low rank beside it."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        if isinstance(layer, nn.Linear):
            self.down: nn.Module = nn.Linear(layer.in_features, 4, bias=False)
            self.up: nn.Module = nn.Linear(4, layer.out_features, bias=False)
        else:
            size, stride, padding = layer.kernel_size, layer.stride, layer.padding
            self.down = nn.Conv2d(layer.in_channels, 4, size, stride, padding, bias=False)  # type: ignore[arg-type]
            self.up = nn.Conv2d(4, layer.out_channels, 1, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        """T5 looks at the weight's dtype."""
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return adapted


def _adapt(model: nn.Module) -> None:
    for parent in list(model.modules()):
        if isinstance(parent, Adapted):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | nn.Conv2d):
                setattr(parent, name, Adapted(child))
    for m in model.modules():
        if isinstance(m, nn.LSTM):  # no layer to put an adapter beside: its biases are trained
            for n, p in m.named_parameters():
                p.requires_grad_("bias" in n)
