"""Made-up arguments on which an operator can be run for real.

Shapes, strides, dtypes and plain arguments are those of the node; contents are valid for the
operator. Floating-point numbers lie in [0.05, 0.95]: they can stand for probabilities, variances
and their roots, and none is zero, infinite or denormal. Integers are zero, unless the operator uses
them as indices: then they are spread over the table they index.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from tracer.costs import subgraph
from tracer.torch_private import named_arguments

_NOISE = 1 << 16  # elements; larger tensors repeat them, since making random numbers is slow

Named = Mapping[str, Any]


def make_arguments(
    node: fx.Node, device: torch.device, *, wide_vectors: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments for a call, on `device`; nodes that stand twice give one tensor twice.

    Draws from the default random-number generator of the CPU.

    Args:
        node: the call.
        device: where its tensors shall lie.
        wide_vectors: one-dimensional tensors of half precision become float32. Some kernels keep
            their statistics so (batch norm on the CPU), and their fake versions do not know it.

    Raises:
        RuntimeError, TypeError, LookupError: for arguments that cannot be made up.
    """
    bounds = _index_bounds(node)
    made: dict[fx.Node, Any] = {}

    opaque = _opaque_argument(node)

    def make(source: fx.Node) -> Any:
        if source not in made:
            if source is opaque:
                made[source] = _as_its_producer_makes_it(source, device)
            elif source.op == "get_attr" and "val" not in source.meta:
                made[source] = subgraph(source)
            else:
                made[source] = _make(source.meta["val"], bounds.get(source, 0), device)
                if wide_vectors:
                    made[source] = _widened(made[source])
        return made[source]

    def place(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), make)
    args, kwargs = fx.node.map_aggregate((args, kwargs), place)
    return tuple(args), dict(kwargs)


# What only the forward kernel can write: made-up bytes would send the backward kernel astray.
_OPAQUE = {"_cudnn_rnn_backward": "reserve", "mkldnn_rnn_layer_backward": "workspace"}


def _opaque_argument(node: fx.Node) -> fx.Node | None:
    name = _OPAQUE.get(_name(node), "")
    found = {**named_arguments(node.target, node.args), **node.kwargs}.get(name)
    return found if isinstance(found, fx.Node) else None


def _as_its_producer_makes_it(source: fx.Node, device: torch.device) -> Any:
    """A result of the call that makes it, run on made-up arguments."""
    if source.target is not operator.getitem:
        raise TypeError(f"{source.name} is opaque, and no result of a call")
    producer, position = source.args
    assert isinstance(producer, fx.Node)
    args, kwargs = make_arguments(producer, device)
    target: Any = producer.target
    return target(*args, **kwargs)[position]


def _name(node: fx.Node) -> str:
    """The operator's name without namespace and overload."""
    return str(node.target).removeprefix("aten.").split(".")[0]


def _make(value: Any, bound: int, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, bound, device)
    if isinstance(value, tuple | list):
        return type(value)(_make(v, bound, device) for v in value)
    if isinstance(value, torch.SymInt):
        return int(value)
    return value


def _widened(value: Any) -> Any:
    half = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in half:
        return value.float()
    return value


def _tensor(like: torch.Tensor, bound: int, device: torch.device) -> torch.Tensor:
    if like.layout is not torch.strided:
        raise TypeError(f"cannot make up a tensor of layout {like.layout}")
    shape, stride = [int(s) for s in like.shape], [int(s) for s in like.stride()]
    if device.type == "cuda" and like.device.type == "cpu" and not shape:
        device = like.device  # a number that the kernel takes from the host
    spread = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    base = torch.empty(spread, dtype=like.dtype, device=device)
    _fill(base, _noise(like.dtype, min(spread, _NOISE), bound).to(device))
    return base.as_strided(shape, stride)


def _noise(dtype: torch.dtype, length: int, bound: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(length, device="cpu") < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(length, dtype=torch.float32, device="cpu").mul(0.9).add(0.05).to(dtype)
    return torch.randint(max(bound, 1), (length,), dtype=torch.int64, device="cpu").to(dtype)


def _fill(base: torch.Tensor, noise: torch.Tensor) -> None:
    length = len(noise)
    if not length:
        return
    whole = len(base) // length * length
    base[:whole].view(-1, length).copy_(noise)
    base[whole:].copy_(noise[: len(base) - whole])


def _index_bounds(node: fx.Node) -> dict[fx.Node, int]:
    """For the nodes that give indices, the number of valid ones."""
    rule = _RULES.get(_name(node))
    if rule is None:
        return {}
    named = {**named_arguments(node.target, node.args), **node.kwargs}
    return {source: bound for source, bound in rule(named) if isinstance(source, fx.Node)}


Bounds = list[tuple[Any, int]]


def _shape(named: Named, name: str) -> list[int]:
    return [int(s) for s in named[name].meta["val"].shape]


def _rows(table: str, index: str) -> Callable[[Named], Bounds]:
    """The index selects rows of a table."""
    return lambda named: [(named[index], _shape(named, table)[0])]


def _along(named: Named) -> Bounds:
    """The index selects along `dim` of `self`."""
    shape = _shape(named, "self") or [1]
    return [(named["index"], shape[named["dim"]])]


def _classes(named: Named) -> Bounds:
    """The target is a class: dimension 1 of the scores, or the only one."""
    shape = _shape(named, "self")
    return [(named["target"], shape[min(1, len(shape) - 1)])]


def _advanced(named: Named) -> Bounds:
    """One index tensor for each leading dimension; a gap (None) leaves it whole."""
    table = "self" if "self" in named else "input"
    return list(zip(named["indices"], _shape(named, table), strict=False))


def _plane(dims: int) -> Callable[[Named], Bounds]:
    """The index numbers the positions in the last dimensions of `self`."""
    return lambda named: [(named["indices"], math.prod(_shape(named, "self")[-dims:]))]


_RULES: Mapping[str, Callable[[Named], Bounds]] = {
    "embedding": _rows("weight", "indices"),
    "embedding_dense_backward": lambda named: [(named["indices"], int(named["num_weights"]))],
    "_embedding_bag": _rows("weight", "indices"),
    "_embedding_bag_forward_only": _rows("weight", "indices"),
    "index_select": _along,
    "index_add": _along,
    "index_copy": _along,
    "index_fill": _along,
    "gather": _along,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "take": lambda named: [(named["index"], math.prod(_shape(named, "self")))],
    "index": _advanced,
    "index_put": _advanced,
    "_unsafe_index": _advanced,
    "_unsafe_index_put": _advanced,
    "_unsafe_masked_index": _advanced,
    "_unsafe_masked_index_put_accumulate": _advanced,
    "nll_loss_forward": _classes,
    "nll_loss_backward": _classes,
    "nll_loss2d_forward": _classes,
    "nll_loss2d_backward": _classes,
    "one_hot": lambda named: [(named["self"], int(named.get("num_classes", 1)))],
    "max_pool2d_with_indices_backward": _plane(2),
    "max_pool3d_with_indices_backward": _plane(3),
    "adaptive_max_pool2d_backward": _plane(2),
    "adaptive_max_pool3d_backward": _plane(3),
}
