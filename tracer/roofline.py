"""Costs estimated from a hardware profile: nothing is run, so models on the meta device work too.

A call takes the longer of its arithmetic and its memory traffic, plus a launch (the roofline model,
Williams, Waterman and Patterson 2009). Arithmetic comes from torch's own registry of flop formulas;
a call without a formula is bound by the bytes that it moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from tracer.costs import (
    OperationCost,
    Progress,
    input_tensors,
    output_tensors,
    signature,
    storage_bytes,
    target_name,
)
from tracer.hardware import HardwareProfile
from tracer.torch_private import OpOverload, named_arguments
from tracer.workspace import workspace_bytes

# Formulas that the registry lacks, by the registered operator that has the same arguments.
_SAME_FORMULA = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}

# They read the rows that their index names, not the whole table.
_LOOKUPS = frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather", "take"})

# Much arithmetic that neither the registry nor the bytes know of: words of operators' names.
_HEAVY = frozenset(
    {"linalg", "fft", "cdist", "trilinear", "ctc", "rnn", "svd", "cholesky", "qr", "geqrf"}
    | {"eig", "eigh", "solve", "inverse", "lu", "det", "matrix", "deform"}
)


class RooflineCosts:
    """A `CostModel` for a device that need not exist.

    Args:
        profile: the device, from `tracer.hardware.load_profile`.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self._known: dict[str, OperationCost] = {}
        self._unmeasured: dict[str, str] = {}

    def allocated(self, nbytes: int) -> int:
        return self.profile.allocated(nbytes)

    @property
    def unmeasured(self) -> Mapping[str, str]:
        return dict(self._unmeasured)

    @property
    def view_ns(self) -> int:
        """See `CostModel`."""
        return self.profile.launch_ns if self.profile.device == "cpu" else 0

    def prepare(self, nodes: Sequence[fx.Node], progress: Progress | None = None) -> None:
        for done, node in enumerate(nodes, start=1):
            self.cost(node)
            if progress is not None:
                progress(done, len(nodes))

    def adding_ns(self, call: fx.Node) -> int:
        """See `CostModel`."""
        return self.cost(call).time_ns

    def cost(self, node: fx.Node) -> OperationCost:
        key = signature(node)
        if key not in self._known:
            time_ns = self.profile.launch_ns + round(1e9 * self._seconds(node))
            workspace = workspace_bytes(node, self.profile.device)
            self._known[key] = OperationCost(time_ns, self.profile.allocated(workspace))
        return self._known[key]

    def _seconds(self, node: fx.Node) -> float:
        traffic = moved_bytes(node) / self.profile.byte_rate
        flops = self._flops(node)
        if not flops:
            return traffic
        rate = self.profile.flop_rate(_compute_dtype(node), _kind(node))
        return max(traffic, flops * _padding(node, self.profile.tile) / rate)

    def _flops(self, node: fx.Node) -> int:
        name = _short_name(node)
        formula = _formula(node)
        if formula is None:
            if not _bound_by_bytes(node):
                self._unmeasured[target_name(node)] = (
                    "no formula for its arithmetic: counted by the bytes that it moves"
                )
            return 0
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        try:
            flops = int(formula(*args, **kwargs, out_val=node.meta.get("val")))
            return flops // 2 if _is_causal(node) else flops
        except (TypeError, ValueError, IndexError, KeyError, AssertionError) as error:
            self._unmeasured[target_name(node)] = f"torch's flop formula for {name}: {error!r}"
            return 0


def moved_bytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes, each element of each tensor once.

    A tensor expanded along a dimension is read once; a table only where it is looked up.
    """
    outputs = sum(min(t.numel() * t.element_size(), storage_bytes(t)) for t in output_tensors(node))
    inputs = [min(t.numel() * t.element_size(), storage_bytes(t)) for t in input_tensors(node)]
    if _short_name(node) in _LOOKUPS and inputs:
        inputs[0] = min(inputs[0], outputs)
    return int(outputs + sum(inputs))


def _short_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload."""
    parts = target_name(node).split(".")
    return parts[1] if isinstance(node.target, OpOverload) else parts[-1]


def _formula(node: fx.Node) -> Any:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return flop_registry.get(target)
    same = _SAME_FORMULA.get(_short_name(node))
    packet = getattr(torch.ops.aten, same) if same else target.overloadpacket
    return flop_registry.get(packet)


def _bound_by_bytes(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    name = _short_name(node)
    return name == "linalg_vector_norm" or _HEAVY.isdisjoint(name.split("_"))


def _is_causal(node: fx.Node) -> bool:
    """Whether an attention kernel leaves out the half above the diagonal, which formulas count."""
    named = {**named_arguments(node.target, node.args), **node.kwargs}
    return named.get("is_causal") is True


def _kind(node: fx.Node) -> str:
    name = _short_name(node)
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "matmul"


def _compute_dtype(node: fx.Node) -> torch.dtype:
    """That of the first floating-point input: what the kernel multiplies."""
    for tensor in input_tensors(node):
        if tensor.dtype.is_floating_point or tensor.dtype is torch.int8:
            return tensor.dtype
    return torch.float32


def _padding(node: fx.Node, tile: int) -> float:
    """Computed over useful elements: a product's rows and columns fill whole tiles."""
    results = output_tensors(node)
    if _kind(node) != "matmul" or not results or results[0].dim() < 2:
        return 1.0
    return math.prod(_whole(int(n), tile) / n for n in results[0].shape[-2:] if n)


def _whole(length: int, tile: int) -> int:
    """Length in whole tiles; for less than one there are kernels with smaller tiles."""
    edge = min(tile, 1 << (length - 1).bit_length())
    return -(-length // edge) * edge
