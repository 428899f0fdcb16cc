"""What shares memory in a joint graph: fewer views, and gradients with memory of their own.

Tensors over one storage that look alike are one tensor.

Autograd transposes a weight for its product and transposes that again for the gradient; attention
expands to the sizes that are there already; each of three projections flattens the same input.
In a step of small kernels such calls take a good part of the time. A joint graph is functional, so
all tensors with the same storage, sizes, strides, offset and type are equal, whoever made them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tracer.operators import BACKWARD, aliased_input, is_backward, viewed, writes_arguments
from tracer.torch_private import UNSAFE_VIEW, is_symbolic

_RESHAPES = (torch.ops.aten.view.default, UNSAFE_VIEW)

Key = tuple[Any, ...]


def merge_views(graph: fx.Graph, num_forward_outputs: int) -> None:
    """Lets what reads a view read the first tensor like it instead, and drops views nobody reads.

    A reshape starts from the first packed tensor over its storage. Forward's outputs, and the views
    that lead to them, stay as they are: AOTAutograd has noted which of them are views of what, and
    a view of a detached tensor is not one of the tensor itself, though it looks the same.
    """
    (output,) = graph.find_nodes(op="output")
    _Merger(_leading_to(output.args[0][:num_forward_outputs])).run(graph, num_forward_outputs)
    for node in reversed(list[fx.Node](graph.nodes)):
        if node.op == "call_function" and not node.users and aliased_input(node) is not None:
            graph.erase_node(node)


def own_gradients(graph: fx.Graph, num_forward_outputs: int) -> None:
    """Copies gradients that no backward operation makes, so that one does.

    They are tangents (of what is added to an output), or values of the forward pass (what a custom
    function returns as it is). The copy is made as soon as backward begins.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    backward = (n for n in graph.nodes if n.op == "call_function" and is_backward(n))
    first = next(backward, output)
    for position, node in enumerate(results[num_forward_outputs:], num_forward_outputs):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        root = node
        while (below := viewed(root)) is not None:
            root = below
        if root.op == "call_function" and is_backward(root):
            continue
        late = node.op == "call_function" and is_backward(node)
        with graph.inserting_after(node) if late else graph.inserting_before(first):
            results[position] = graph.call_function(torch.ops.aten.clone.default, (node,))
        results[position].meta.update(val=node.meta["val"].clone(), partitioner_tag=BACKWARD)
    output.args = (tuple(results),)


def _leading_to(outputs: Iterable[Any]) -> set[fx.Node]:
    """The views behind these nodes, themselves included."""
    found: set[fx.Node] = set()
    for node in outputs:
        while isinstance(node, fx.Node) and node not in found:
            found.add(node)
            node = node.args[0] if node.target is operator.getitem else viewed(node)
    return found


class _Merger:
    def __init__(self, fixed: set[fx.Node]) -> None:
        self.fixed = fixed
        self.root: dict[fx.Node, fx.Node] = {}  # the node that owns the storage
        self.first: dict[Key, fx.Node] = {}
        self.packed: dict[Key, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}

    def run(self, graph: fx.Graph, num_forward_outputs: int) -> None:
        for node in graph.nodes:
            if node.op == "output":
                outputs = list(node.args[0])
                late = map(self._like, outputs[num_forward_outputs:])
                node.args = ((*outputs[:num_forward_outputs], *late),)
                continue
            if node.op == "call_function" and not writes_arguments(node) and node not in self.fixed:
                _set_args(node, *fx.map_arg((node.args, node.kwargs), self._like))
            self._note(node)

    def _like(self, item: Any) -> Any:
        return self.same.get(item, item) if isinstance(item, fx.Node) else item

    def _note(self, node: fx.Node) -> None:
        below = viewed(node)
        root = self.root[node] = node if below is None else self.root[below]
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not _is_plain(val):
            return
        first = self.first.setdefault((root, *_look(val)), node)
        if first is not node:
            self.same[node] = first
            return
        is_free = node.target in _RESHAPES and node not in self.fixed
        if is_free and below is not None and _is_packed(below.meta["val"]):
            start = self.packed[root, *_span(below.meta["val"])]
            _set_args(node, (start, *node.args[1:]), node.kwargs)
        if _is_packed(val):
            self.packed.setdefault((root, *_span(val)), node)


def _set_args(node: fx.Node, args: Any, kwargs: Any) -> None:
    node.args, node.kwargs = args, kwargs
    node.meta.pop("aliased_input", None)  # may be another node of the same storage now


def _is_plain(val: torch.Tensor) -> bool:
    if val.layout is not torch.strided:
        return False
    return not any(map(is_symbolic, (*val.shape, *val.stride(), val.storage_offset())))


def _look(val: torch.Tensor) -> Key:
    """All that tells two tensors over one storage apart."""
    bits = val.is_conj(), val.is_neg()
    return type(val), val.dtype, tuple(val.shape), val.stride(), val.storage_offset(), *bits


def _span(val: torch.Tensor) -> Key:
    return type(val), val.dtype, val.storage_offset(), val.numel(), val.is_conj(), val.is_neg()


def _is_packed(val: torch.Tensor) -> bool:
    """Whether each stride is the product of the sizes behind it, those of size one included."""
    if not _is_plain(val) or not val.numel():
        return False
    expected = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True
