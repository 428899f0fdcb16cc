"""What may be assumed about an operator: is it a view, may it run twice, does it draw numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tracer.torch_private import OpOverload, storage_key

BACKWARD = "is_backward"
"""What torch's tracer notes as `partitioner_tag` of nodes of the backward pass."""

# Operators of these namespaces are functional if their schema says so. Others (a user's custom
# operators, collectives) may have effects that no schema shows: they run exactly once.
_PURE_NAMESPACES = ("aten", "prims")

# Calls that wait for other ranks.
_COLLECTIVE_NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d",
    "c10d_functional",
    "fsdp",
    "symm_mem",
)

# Their content is whatever the memory held: a second call gives something else.
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node stands for."""
    val = node.meta.get("val")
    items = val if isinstance(val, (tuple, list)) else [val]
    return [v for v in items if isinstance(v, torch.Tensor)]


def aliased_input(node: fx.Node) -> fx.Node | None:
    """The input whose storage the node's result shares, or None if it makes storages of its own.

    The operator's schema decides; a fake tensor that shares its storage with an input's counts too
    (`_unsafe_view` shares without saying so).
    """
    if "aliased_input" not in node.meta:
        node.meta["aliased_input"] = _find_aliased_input(node)
    found: fx.Node | None = node.meta["aliased_input"]
    return found


def _find_aliased_input(node: fx.Node) -> fx.Node | None:
    target = node.target
    if isinstance(target, OpOverload):
        schema = target._schema
        if writes_arguments(node):
            return None
        shared = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
        for argument, value in _bound_arguments(node):
            info = argument.alias_info
            if info is not None and shared & set(info.before_set) and isinstance(value, fx.Node):
                return value
    own = {storage_key(t) for t in tensors_of(node) if _has_storage(t)}
    for source in node.all_input_nodes:
        if own & {storage_key(t) for t in tensors_of(source) if _has_storage(t)}:
            return source
    return None


def viewed(node: fx.Node) -> fx.Node | None:
    """What a node, also one of several results, is a view of; None if it owns its storage."""
    if node.op != "call_function":
        return None
    if node.target is not operator.getitem:
        return aliased_input(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return aliased_input(source) if source.op == "call_function" else source


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph belongs to the backward pass."""
    return bool(node.meta.get("partitioner_tag") == BACKWARD)


def writes_arguments(node: fx.Node) -> bool:
    """Whether a call says that it changes one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether a call draws from the default generator."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_collective(node: fx.Node) -> bool:
    """Whether a call is one of torch's own that communicate."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVE_NAMESPACES


def waits_for_others(node: fx.Node) -> bool:
    """Whether a call may wait for other ranks: one rank must never make it alone.

    A custom operator may communicate without saying so; in a distributed job it counts, too.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace in _PURE_NAMESPACES:
        return False
    job = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_collective(node) or job


def is_recomputable(node: fx.Node) -> bool:
    """Whether a second call gives the same result and changes nothing else."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _PURE_NAMESPACES:
        return False
    if target._schema.is_mutable or target._schema.name.split("::")[1] in _UNINITIALISED:
        return False
    if any(a.name == "generator" and v is not None for a, v in _bound_arguments(node)):
        return False  # a generator of the user's: its state is not ours to rewind
    return _gives_tensors_only(node)


def _gives_tensors_only(node: fx.Node) -> bool:
    val = node.meta.get("val")
    items = val if isinstance(val, (tuple, list)) else [val]
    return bool(items) and all(isinstance(v, torch.Tensor) or v is None for v in items)


def _bound_arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """(schema argument, value) for the arguments that the call gives."""
    assert isinstance(node.target, OpOverload)
    arguments = node.target._schema.arguments
    bound: list[tuple[Any, Any]] = list(zip(arguments, node.args, strict=False))
    return bound + [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
