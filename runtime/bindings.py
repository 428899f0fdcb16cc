"""Faster ways to call the same operators.

A call through `torch.ops.aten.mm.default` boxes its arguments and costs more time than `torch.mm`,
which reaches the same kernel through the same dispatcher. In a step of small kernels that shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

# Only operators whose arguments, in order, are those of the Python binding.
_FUNCTIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze,
    aten.select.int: torch.select,
    aten.sum.dim_IntList: torch.sum,
    aten.clone.default: torch.clone,
    aten.detach.default: torch.detach,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.native_dropout.default: torch.native_dropout,
    aten.native_layer_norm.default: torch.native_layer_norm,
}
_METHODS: Final[Mapping[Any, str]] = {aten.view.default: "view", aten.expand.default: "expand"}


def call_directly(node: fx.Node) -> fx.Node:
    """Makes a node of a rewritten graph call the Python binding where there is an equal one."""
    if node.op != "call_function" or node.kwargs or not node.args:
        return node
    if not isinstance(node.args[0], fx.Node) or None in node.args:
        return node
    if node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]
    elif node.target in _METHODS:
        node.op, node.target = "call_method", _METHODS[node.target]
    return node
