"""Lowers rewritten graphs with Inductor: fused kernels, the same schedule.

Each rewritten graph, forward and every slice of the backward pass, is lowered by itself, so what
the schedule saves is what crosses from one to the next, and what it computes again is in a graph
of its own. Composite operators are decomposed as Inductor wants them, in the schedule's order.
Random operators are not: they stay the kernels that eager mode calls, which draw the same numbers,
and a second run puts the generator back as in eager mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from runtime.rewrite import STATE_BYTES, Rewritten, graph_of
from runtime.torch_private import (
    autocast_off,
    decomposed,
    fake_mode_of,
    inductor_compile,
    tree_flatten,
    tree_unflatten,
)
from tracer.errors import PlannerError


class Lowered:
    """A graph lowered by Inductor, called like the graph: a list in, which it empties.

    Compiled code reads memory as the dtype that it was compiled for, without looking. An operator
    whose fake results are of another dtype than its real ones must not get that far, so the inputs
    of the first call are looked at.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        call: Callable[[list[Any]], Sequence[Any]],
        structure: Any,
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        self.module = module
        self._call, self._structure = call, structure
        self._dtypes: Sequence[torch.dtype | None] | None = dtypes

    def forward(self, args: list[Any]) -> Any:
        if self._dtypes is not None:
            _check_dtypes(args, self._dtypes)
            self._dtypes = None
        return tree_unflatten(list(self._call(args)), self._structure)


def lowered(rewritten: Rewritten) -> Rewritten:
    """The same program in Inductor's kernels.

    Raises:
        PlannerError: Inductor cannot lower one of the graphs.
    """
    slices = tuple(
        dataclasses.replace(part, function=_lower(graph_of(part.function)))
        for part in rewritten.slices
    )
    forward = _lower(graph_of(rewritten.forward))
    return dataclasses.replace(rewritten, forward=forward, slices=slices)


def _lower(module: fx.GraphModule) -> Lowered:
    inputs = _examples(module)
    structure: list[Any] = []

    def flat(*args: Any) -> list[Any]:
        leaves, tree = tree_flatten(_plain(_AsCaptured(module).run(*args)))
        structure.append(tree)
        return leaves

    try:
        # Casts stand in the graph; the caller's autocast must not add its own.
        with torch.no_grad(), autocast_off():
            graph = decomposed(flat, inputs)
            call = inductor_compile(graph, inputs)
    except Exception as error:  # Inductor raises whatever its parts raise
        raise PlannerError(
            f"backend='inductor': Inductor cannot lower this step ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}); "
            "plan with backend='eager'"
        ) from error
    return Lowered(module, call, structure[-1], [getattr(i, "dtype", None) for i in inputs])


def _check_dtypes(args: Sequence[Any], expected: Sequence[torch.dtype | None]) -> None:
    for number, (argument, dtype) in enumerate(zip(args, expected, strict=True)):
        if isinstance(argument, torch.Tensor) and argument.dtype != dtype:
            raise PlannerError(
                f"backend='inductor': a saved value is {argument.dtype}, but its operator said "
                f"{dtype} when it was traced (input {number}); plan with backend='eager'"
            )


def _examples(module: fx.GraphModule) -> list[Any]:
    """Fake inputs; random-number states, which no capture has seen, are made up."""
    nodes = list(module.graph.find_nodes(op="placeholder"))
    mode = fake_mode_of([n.meta.get("val") for n in nodes])
    with mode:
        return [
            torch.empty(n.meta[STATE_BYTES], dtype=torch.uint8)
            if STATE_BYTES in n.meta
            else n.meta["val"]
            for n in nodes
        ]


def _plain(result: Any) -> Any:
    """The same in lists and tuples that can be changed, where fx has its own."""
    if not isinstance(result, list | tuple):
        return result
    parts = [_plain(r) for r in result]
    return parts if isinstance(result, list) else tuple(parts)


class _AsCaptured(fx.Interpreter):
    """Runs a graph so that each result has the strides that it was captured with.

    Decompositions may leave others (a concatenation of one tensor keeps that tensor's). What was
    captured relies on them, a `view` for one, and what one graph hands over the next one takes.
    """

    def run_node(self, n: fx.Node) -> Any:
        result, val = super().run_node(n), n.meta.get("val")
        if isinstance(result, tuple | list) and isinstance(val, tuple | list):
            return tuple(_like(r, v) for r, v in zip(result, val, strict=True))
        return _like(result, val)


def _like(result: Any, val: Any) -> Any:
    """The result with the strides of `val`, which has its shape and dtype."""
    if not isinstance(result, torch.Tensor) or not isinstance(val, torch.Tensor):
        return result
    if result.dtype != val.dtype or result.shape != val.shape:
        raise TypeError(
            f"a decomposition gives {result.dtype} {tuple(result.shape)} where "
            f"{val.dtype} {tuple(val.shape)} was captured"
        )
    if result.layout is not torch.strided or result.stride() == val.stride():
        return result
    order = sorted(range(val.dim()), key=lambda dim: -val.stride()[dim])
    back = sorted(range(val.dim()), key=order.__getitem__)
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
