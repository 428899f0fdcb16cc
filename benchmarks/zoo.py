"""The models of the tables: one of each kind that people train, random weights, no downloads.

Each is made small enough for two CPU cores and wide enough that its values, not its parameters,
fill the memory. `Entry.make()` gives the module in training mode and a batch with labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
Made = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        title: for the table.
        build: makes module and batch.
        autocast: dtype of the autocast region around the step's forward, if any.
        blocks: classes of the repeated parts, around which people put checkpoints.
    """

    title: str
    build: Callable[[], Made]
    autocast: torch.dtype | None = None
    blocks: tuple[str, ...] = ()

    def autocast_on(self, device: str) -> contextlib.AbstractContextManager[object]:
        """The autocast region of the step's forward."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device, self.autocast)

    def make(self, device: str, copies: int = 1) -> Made:
        """Module in training mode and batch, on a device; `copies` makes the batch larger."""
        torch.manual_seed(0)
        model, batch = self.build()
        larger = {k: torch.cat([v] * copies).to(device) for k, v in batch.items()}
        if batch.get("input_ids") is batch.get("labels") is not None:
            larger["labels"] = larger["input_ids"]
        return model.to(device).train(), larger


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length))


def text(model: nn.Module, batch: int, length: int, vocabulary: int) -> Made:
    ids = tokens(batch, length, vocabulary)
    return model, {"input_ids": ids, "labels": ids}


def images(model: nn.Module, batch: int, edge: int) -> Made:
    pixels = torch.randn(batch, 3, edge, edge)
    return model, {"pixel_values": pixels, "labels": torch.arange(batch) % 2}


def bert(layers: int, hidden: int, batch: int, length: int, vocabulary: int) -> Callable[[], Made]:
    def build() -> Made:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
        )
        return text(BertForMaskedLM(config), batch, length, vocabulary)

    return build


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=8000)
    return text(GPT2LMHeadModel(config), 2, 256, 8000)


def llama(*, tied: bool) -> Callable[[], Made]:
    def build() -> Made:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=8000,
            tie_word_embeddings=tied,
        )
        return text(LlamaForCausalLM(config), 2, 256, 8000)

    return build


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=384,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=6,
        vocab_size=8000,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return text(T5ForConditionalGeneration(config), 4, 192, 8000)


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    return images(ViTForImageClassification(config), 2, 224)


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(embed_dim=96, depths=[2, 2, 2, 2], drop_path_rate=0.1)
    return images(SwinForImageClassification(config), 2, 224)


def resnet50() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    return images(ResNetForImageClassification(ResNetConfig()), 4, 224)


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(depths=[3, 3, 5, 3], drop_path_rate=0.1)
    return images(ConvNextForImageClassification(config), 2, 224)


class Denoiser(nn.Module):
    """A U-Net and the mean-square loss of its prediction."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.net = UNet2DModel(
            sample_size=64,
            block_out_channels=(64, 128, 192),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(sample, timestep).sample, noise)


def unet() -> Made:
    image = torch.randn(2, 3, 64, 64)
    return Denoiser(), {
        "sample": image,
        "timestep": torch.tensor([3, 400]),
        "noise": torch.randn_like(image),
    }


def mixtral() -> Made:
    """With the experts as batched products: every shape is known, so it is one graph."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=4000,
        experts_implementation="grouped_mm",
    )
    return text(MixtralForCausalLM(config), 2, 256, 4000)


def mamba() -> Made:
    """The scan is a loop over the sequence, which the trace unrolls: a short sequence."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=512, num_hidden_layers=2, vocab_size=4000)
    return text(MambaForCausalLM(config), 8, 32, 4000)


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=8000,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        max_source_positions=500,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(1, 80, 1000),
        "labels": tokens(1, 128, 8000),
    }


class Recurrent(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 4000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def lstm() -> Made:
    return text(Recurrent(), 32, 24, 4000)


ZOO: dict[str, Entry] = {
    "bert-large": Entry(
        "BERT-Large, 24 layers", bert(24, 1024, 1, 512, 30522), blocks=("BertLayer",)
    ),
    "bert-small": Entry(
        "BERT, 4 layers, hidden 512", bert(4, 512, 2, 256, 8000), blocks=("BertLayer",)
    ),
    "gpt2": Entry("GPT-2, 6 layers", gpt2, blocks=("GPT2Block",)),
    "llama": Entry("Llama, grouped queries", llama(tied=False), blocks=("LlamaDecoderLayer",)),
    "llama-tied": Entry(
        "Llama, grouped queries, tied", llama(tied=True), blocks=("LlamaDecoderLayer",)
    ),
    "t5": Entry("T5, 4 + 4 layers", t5, blocks=("T5Block",)),
    "vit": Entry("ViT, 6 layers", vit, blocks=("ViTLayer",)),
    "swin": Entry("Swin", swin, blocks=("SwinLayer",)),
    "resnet50": Entry("ResNet-50", resnet50, blocks=("ResNetBottleNeckLayer",)),
    "convnext": Entry("ConvNeXt", convnext, blocks=("ConvNextLayer",)),
    "unet": Entry("U-Net (diffusers)", unet, blocks=("ResnetBlock2D", "Attention")),
    "mixtral": Entry("Mixtral, 4 experts", mixtral, blocks=("MixtralDecoderLayer",)),
    "mamba": Entry("Mamba, 2 layers", mamba, blocks=("MambaBlock",)),
    "whisper": Entry(
        "Whisper, 4 + 4 layers", whisper, blocks=("WhisperEncoderLayer", "WhisperDecoderLayer")
    ),
    "lstm": Entry("LSTM, 2 layers", lstm),
    "bert-bf16": Entry(
        "BERT, bfloat16 autocast",
        bert(4, 512, 2, 256, 8000),
        autocast=torch.bfloat16,
        blocks=("BertLayer",),
    ),
}
"""The models of the table of predicted against measured figures."""

LARGER: dict[str, Entry] = {
    "bert-large-6": Entry(
        "BERT-Large, 6 layers", bert(6, 1024, 2, 512, 30522), blocks=("BertLayer",)
    ),
    "bert-12": Entry(
        "BERT, 12 layers, hidden 512", bert(12, 512, 2, 512, 30522), blocks=("BertLayer",)
    ),
}
"""Models that are compared with other tools beside those of the zoo."""


REAL = {
    "bert-large": "BertLayer",
    "gpt2-medium": "GPT2Block",
    "llama-8": "LlamaDecoderLayer",
    "t5-large": "T5Block",
    "vit-large": "ViTLayer",
    "swin": "SwinLayer",
    "resnet-50": "ResNetBottleNeckLayer",
    "mixtral-8": "MixtralDecoderLayer",
}
"""Models of `benchmarks.models` by name, with their blocks: `real-bert-large`, for a GPU."""


def entry_of(name: str) -> Entry:
    """The entry of that name: of `ZOO`, of `LARGER`, or `real-` and a name of `REAL`.

    Raises:
        LookupError: there is none; lists the names.
    """
    if name.startswith("real-"):
        from benchmarks.models import MODELS

        plain = name.removeprefix("real-")
        return Entry(f"{plain}, real size", MODELS[plain], blocks=(REAL[plain],))
    known = ZOO | LARGER
    if name not in known:
        raise LookupError(f"{name!r} is not one of {', '.join(known)}, real-{', real-'.join(REAL)}")
    return known[name]
