"""A smaller copy of a call, for one that does not fit into the memory at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracer.costs import output_tensors


class NotScalable(Exception):
    """The call has no leading dimension that could be made smaller."""


def smaller_call(node: fx.Node, factor: int) -> fx.Node:
    """The same call with the leading dimension of its first result divided by `factor`.

    Wherever the size stands, in shapes or in plain arguments, it is replaced. The result's node
    stands in a graph of its own, with meta tensors in `meta["val"]`.

    Raises:
        NotScalable: there is no such dimension, or the operator refuses the smaller shapes.
    """
    results = output_tensors(node)
    size = int(results[0].shape[0]) if results and results[0].dim() else 0
    if size < 2 * factor:
        raise NotScalable(f"{node.name}: leading dimension {size}")
    small = size // factor
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def copy(source: fx.Node) -> fx.Node:
        if source not in made:
            if "val" not in source.meta:
                raise NotScalable(f"{node.name} takes a graph")
            made[source] = graph.placeholder(source.name)
            made[source].meta["val"] = _shrink(source.meta["val"], size, small)
        return made[source]

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copy)
    args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: _replaced(a, size, small))
    call = graph.create_node("call_function", node.target, tuple(args), dict(kwargs))
    meta_args, meta_kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
    target: Any = node.target
    try:
        call.meta["val"] = target(*meta_args, **meta_kwargs)
    except Exception as error:  # whatever an operator may say about shapes it does not take
        raise NotScalable(f"{node.name}: {error}") from error
    return call


def _shrink(value: Any, size: int, small: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_shrink(v, size, small) for v in value)
    if not isinstance(value, torch.Tensor):
        return _replaced(value, size, small)
    shape = [_replaced(int(n), size, small) for n in value.shape]
    # Dense again, in the same order of dimensions; expanded dimensions stay expanded.
    stride, step = [0] * len(shape), 1
    strides = [int(s) for s in value.stride()]
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[d] or int(value.shape[d]) == 1:
            stride[d], step = step, step * shape[d]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")


def _replaced(argument: Any, size: int, small: int) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("meta")
    same = isinstance(argument, int) and not isinstance(argument, bool) and argument == size
    return small if same else argument
