"""What people do about a step that does not fit, each put on a module as they would.

A variant is a name and plain options, so that it can be sent to another process. `put_on` returns
the callable to train with; it raises what the tool itself raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks import peers
from benchmarks.zoo import Batch, Entry
from planner import plan
from planner.instance import Instance
from planner.problem import Problem, Solution
from planner.solvers import SOLVERS
from runtime.torch_private import set_activation_memory_budget, set_fallback_random
from tracer.errors import PlannerError

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
COSTLY = (
    *MATMULS,
    aten.convolution.default,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
CHECKPOINTS = ("checkpoint", "segments", "selective")
BACKENDS = {"aot": "aot_eager_decomp_partition", "inductor": "inductor"}


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        name: unique in a run.
        kind: a key of `KINDS`.
        options: for that kind.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


EAGER = Variant("eager", "eager")


def alternatives(fractions: Sequence[float], backends: Sequence[str]) -> list[Variant]:
    """Everything that is not ours."""
    found = [
        Variant("checkpoint per block", "checkpoint"),
        Variant("checkpoint in sqrt(n) segments", "segments"),
        Variant("selective, matmuls and attention kept", "selective", {"every": 1}),
        Variant("selective, every second matmul kept", "selective", {"every": 2}),
    ]
    for backend in backends:
        found += [
            Variant(
                f"activation_memory_budget {f:g}, {backend}",
                "compile",
                {"backend": backend, "fraction": f},
            )
            for f in fractions
        ]
    return found


def put_on(variant: Variant, model: nn.Module, batch: Batch, entry: Entry) -> Callable[..., Any]:
    """Applies a variant to a module in place."""
    return KINDS[variant.kind](model, batch, entry, dict(variant.options))


def _eager(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    del batch, entry, options
    return model


def _checkpoint(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    """`torch.utils.checkpoint` around each block, as transformers' switch does it."""
    del batch
    for block in blocks(model, entry):
        _wrap(block, options.get("context_fn"))
    return model


def _selective(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    """Selective checkpointing: costly operators are kept, of the matmuls every n-th recomputed."""
    context_fn = functools.partial(selective_contexts, options["every"])
    return _checkpoint(model, batch, entry, {"context_fn": context_fn})


def selective_contexts(every: int) -> Any:
    """Contexts for one checkpointed region; torchtitan's rule for `every` = 2."""
    seen = {True: 0, False: 0}

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in MATMULS:
            seen[ctx.is_recompute] += 1
            if every > 1 and seen[ctx.is_recompute] % every == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        keep = operator in COSTLY
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _segments(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    """Chen's rule (1604.06174): n blocks in about sqrt(n) segments, one checkpoint for each."""
    del batch, options
    whole = blocks(model, entry)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    lists = [m for m in lists if all(any(child is b for b in whole) for child in m)]
    if not lists:
        raise ValueError("its blocks are in no list, so that they cannot be put into segments")
    for layers in lists:
        length = math.ceil(len(layers) / round(math.sqrt(len(layers))))
        segments = [Segment(layers[i : i + length]) for i in range(0, len(layers), length)]
        for _ in range(len(layers)):
            del layers[-1]
        layers.extend(segments)
    return model


class Segment(nn.Module):
    """Several blocks in one checkpoint. They must hand one tensor on and share the rest."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what the model asks its blocks for (an attention type)
            layers: Any = super().__getattr__("layers")
            return getattr(layers[0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, *args, **kwargs)
                if not isinstance(x, torch.Tensor):
                    raise TypeError("its blocks return more than one tensor")
            return x

        return checkpoint(run, hidden, use_reentrant=False)


def _compile(
    model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]
) -> Callable[..., Any]:
    """torch.compile, whose partitioner saves at most a fraction of what it would like to."""
    del batch, entry
    set_activation_memory_budget(options["fraction"])
    if options.get("fallback_random"):
        set_fallback_random()
    return torch.compile(model, backend=BACKENDS[options["backend"]])


def _ours(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    del entry
    p = plan(
        model,
        batch,
        budget_gb=options["budget_bytes"] / 1e9,
        time_limit=options.get("time_limit", 30.0),
        solver=options.get("solver", "auto"),
        backend=options.get("backend", "eager"),
    )
    return p.apply()


def _rotor(model: nn.Module, batch: Batch, entry: Entry, options: dict[str, Any]) -> nn.Module:
    """The recurrence of rotor, run by our runtime: its own handles no such model."""

    def solve(problem: Problem, *, time_limit: float) -> Solution:
        del time_limit
        instance = Instance(problem)
        budget = problem.budget_bytes
        found = [list(o) for o in peers.rotor(instance, budget) if instance.peak(o) <= budget]
        if not found:
            raise PlannerError("the recurrence has no schedule within this peak")
        best: list[int] = min(found, key=lambda order: instance.time_of(order))
        return Solution(tuple(best))

    SOLVERS["rotor"] = solve
    return _ours(model, batch, entry, {**options, "solver": "rotor"})


KINDS: Mapping[str, Callable[[nn.Module, Batch, Entry, dict[str, Any]], Callable[..., Any]]] = {
    "eager": _eager,
    "checkpoint": _checkpoint,
    "segments": _segments,
    "selective": _selective,
    "compile": _compile,
    "ours": _ours,
    "rotor": _rotor,
}


def blocks(model: nn.Module, entry: Entry) -> list[nn.Module]:
    """The repeated parts that people put checkpoints around.

    Raises:
        ValueError: the model has none.
    """
    found = [m for m in model.modules() if type(m).__name__ in entry.blocks]
    if not found:
        raise ValueError("it has no blocks to put a checkpoint around")
    return found


def _wrap(block: nn.Module, context_fn: Callable[[], Any] | None) -> None:
    inner = block.forward
    more: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **more, **kwargs)

    block.forward = forward
