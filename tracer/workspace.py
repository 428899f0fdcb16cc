"""Workspace of operators, from what their kernels are known to allocate.

For estimates only: where the device is at hand the allocator is asked instead (`tracer.probe`).
Operators that are not listed allocate their results and nothing else, or little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import fx

from tracer.costs import input_tensors, output_tensors, target_name


def workspace_bytes(node: fx.Node, device: str) -> int:
    """Estimated most bytes that a call holds beyond its inputs and results."""
    name = target_name(node).removeprefix("aten.").split(".")[0]
    rule = _RULES.get(name) or (_CUDA_RULES.get(name) if device == "cuda" else None)
    return rule(node) if rule is not None else 0


def _safe_softmax(node: fx.Node) -> int:
    """Which elements are masked, and which rows are so entirely: a byte each."""
    (result,) = output_tensors(node)
    return result.numel() + result.numel() // max(1, int(result.shape[-1]))


def _sorted_indices(node: fx.Node) -> int:
    """Indices and their positions, sorted through a second copy of both."""
    indices = [t for t in input_tensors(node) if not t.dtype.is_floating_point]
    return sum(4 * t.numel() * 8 for t in indices)


def _flash_backward(node: fx.Node) -> int:
    """FlashAttention 2: dq accumulated in float32 and the row sums, both padded."""
    query = input_tensors(node)[1]
    batch, heads, length, size = (int(n) for n in query.shape)
    rows = batch * heads * math.ceil(length / 128) * 128
    return rows * (math.ceil(size / 32) * 32 + 1) * 4


def _half_gradients(node: fx.Node) -> int:
    """Memory-efficient attention: gradients accumulate in float32 where they are half precision."""
    return sum(t.numel() * 4 for t in output_tensors(node)[:3] if t.element_size() == 2)


def _sort(node: fx.Node) -> int:
    """Keys and positions, through a second copy of both."""
    return sum(t.numel() * t.element_size() for t in output_tensors(node))


def _contiguous_copies(node: fx.Node) -> int:
    """Convolutions copy inputs that are not dense in the layout that the kernel wants."""
    dense = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return sum(
        t.numel() * t.element_size()
        for t in input_tensors(node)
        if not any(_has_layout(t, layout) for layout in dense)
    )


def _has_layout(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    needed = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(layout, tensor.dim())
    return tensor.dim() == needed and tensor.is_contiguous(memory_format=layout)


Rule = Callable[[fx.Node], int]

_RULES: Mapping[str, Rule] = {
    "_safe_softmax": _safe_softmax,
    "convolution": _contiguous_copies,
    "convolution_backward": _contiguous_copies,
}

_CUDA_RULES: Mapping[str, Rule] = {
    "embedding_dense_backward": _sorted_indices,
    "index_put": _sorted_indices,
    "_unsafe_index_put": _sorted_indices,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    # Models on the meta device are traced as on the CPU, and run elsewhere.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _half_gradients,
    "sort": _sort,
    "topk": _sort,
}
