"""The only file in `runtime` that touches private names of torch. Each says what it relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._prims import rng_prims
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

run_and_save_rng_state: Callable[..., Any] = rng_prims.run_and_save_rng_state
"""Higher-order operator (op, *args) -> (state before, results): since torch 2.1."""

run_with_rng_state: Callable[..., Any] = rng_prims.run_with_rng_state
"""Higher-order operator (state, op, *args) -> results, leaving the generator as it was."""

__all__ = [
    "BoxedCodeGen",
    "OpOverload",
    "autocast_off",
    "backward_hooks",
    "graph_kept",
    "install_call",
    "installed_call",
    "is_overload",
    "lint",
    "plain_call",
    "remove_call",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "saved_by_autograd",
    "set_backward_hooks",
    "tree_leaves",  # of torch.utils._pytree: tensors in outputs of any shape, the same since 2.0
]


class BoxedCodeGen(CodeGen):
    """Generates `forward(self, args)` that takes a list and empties it.

    Whoever calls a function with plain arguments holds them until it returns; a list lets each
    tensor be freed after its last use. Relies on `CodeGen.gen_fn_def(free_vars, annotation)`, where
    the free variables are the placeholders' names (with annotations after a colon), the same since
    torch 1.11.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"    {', '.join(names)}, = args\n" if names else ""
        return f"def forward(self, args):\n{unpack}    args.clear()\n"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return []


def autocast_off() -> AbstractContextManager[Any]:
    """Casts stand in the graph as operations: autocast must not add its own.

    Relies on `torch._C._DisableAutocast`, the guard that AOTAutograd itself runs under.
    """
    return torch._C._DisableAutocast()


def graph_kept() -> bool:
    """Whether the running backward was asked to keep its graph (`retain_graph`).

    Relies on `torch._C._autograd._get_current_graph_task_keep_graph`, as AOTAutograd does.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def install_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Makes `module(...)` run `call` instead.

    Relies on `nn.Module._compiled_call_impl`, which `nn.Module.compile` sets: it is left out when a
    module is pickled or deep-copied, and no key of `state_dict` changes.
    """
    module._compiled_call_impl = call


def remove_call(module: torch.nn.Module) -> None:
    """Undoes `install_call`."""
    module._compiled_call_impl = None


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's own call, hooks included. Relies on `nn.Module._call_impl`."""
    return module._call_impl


def backward_hooks(module: torch.nn.Module) -> tuple[Any, Any]:
    """Full backward hooks and pre-hooks. Relies on `nn.Module._backward_hooks` and
    `_backward_pre_hooks`, which `register_full_backward_hook` fills.
    """
    return module._backward_hooks, module._backward_pre_hooks


def set_backward_hooks(module: torch.nn.Module, hooks: tuple[Any, Any]) -> None:
    """Puts what `backward_hooks` gave in place."""
    module._backward_hooks, module._backward_pre_hooks = hooks


def is_overload(target: Any) -> bool:
    """Whether an fx target is an aten-level operator. Relies on `torch._ops.OpOverload`."""
    return isinstance(target, OpOverload)


def lint(module: fx.GraphModule) -> None:
    """fx's own check of a graph."""
    module.graph.lint()


def saved_by_autograd(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that the graph behind `outputs` saved for backward, those of our own nodes too.

    Relies on what torch documents: built-in nodes show saved tensors as attributes `_saved_*`,
    Python ones as `saved_tensors`.
    """
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        names = [n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors"]
        for leaf in tree_leaves([getattr(node, name) for name in names]):
            if isinstance(leaf, torch.Tensor):
                yield leaf
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)


def installed_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `install_call` put in place, if anything."""
    return module._compiled_call_impl
