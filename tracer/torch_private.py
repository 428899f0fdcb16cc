"""The only file in `tracer` that touches private names of torch. Each says what it relies on."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._functorch.aot_autograd import aot_module_simplified
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "TorchDynamoException",
    "aot_joint",
    "branches_on_data",
    "break_after",
    "break_of",
    "dynamo_settings",
    "forward_failed",
    "named_arguments",
    "no_fake_mode",
    "plain_eager",
    "storage_key",
    "tree_leaves",
    "tree_map",
]

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def aot_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: PartitionFn,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
) -> Callable[..., Any]:
    """Runs AOTAutograd on a Dynamo graph.

    Relies on `torch._functorch.aot_autograd.aot_module_simplified` calling `partition(joint,
    joint_inputs, num_fwd_outputs=..., **more)` with the functional joint graph, then the compilers
    with the two graphs it returned; the same since torch 2.0. The public wrapper
    `torch._dynamo.backends.common.aot_autograd` adds logging and a guard, and nothing that we need.
    """
    compilers: dict[str, Any] = {
        "fw_compiler": forward,
        "bw_compiler": backward,
        "inference_compiler": inference,
    }
    return aot_module_simplified(module, inputs, partition_fn=partition, **compilers)


def dynamo_settings() -> AbstractContextManager[None]:
    """Settings under which we trace.

    Relies on `torch._dynamo.config` names that exist from torch 2.11 to 2.15. A recompile limit
    would make Dynamo run the model unplanned: reaching it raises instead. Log messages written
    in a forward cannot be part of a graph; they are left out rather than refused.
    """
    config = torch._dynamo.config
    ignored = "ignore_logging_functions"  # called ignore_logger_methods before torch 2.12
    if not hasattr(config, ignored):
        ignored = "ignore_logger_methods"
    loggers = {f for n, f in vars(logging.Logger).items() if callable(f) and not n.startswith("_")}
    return config.patch(  # type: ignore[no-any-return]
        {
            "recompile_limit": 64,
            "accumulated_recompile_limit": 4096,
            "fail_on_recompile_limit_hit": True,
            ignored: getattr(config, ignored) | loggers,
        }
    )


def forward_failed(error: Exception) -> bool:
    """Whether tracing stopped because the forward itself raises for these inputs.

    Relies on `torch._dynamo.exc.TorchRuntimeError` (an operator rejects its arguments) and on the
    words that Dynamo uses for an exception that the traced Python code raised.
    """
    return isinstance(error, TorchRuntimeError) or str(error).startswith("Observed exception")


def break_of(error: Exception) -> str:
    """Where and why Dynamo could not go on, as "file:line: reason".

    Relies on the text of its errors: a headline, an explanation, and the user's stack below the
    words "from user code".
    """
    headline, _, stack = str(error).partition("from user code:")
    places = re.findall(r'File "([^"]+)", line (\d+)', stack)
    where = f"{places[-1][0]}:{places[-1][1]}" if places else "unknown place"
    return f"{where}: {headline.strip().splitlines()[0]}" if headline.strip() else where


def break_after(module: fx.GraphModule) -> str:
    """Where and why Dynamo ended this graph, as "file:line: reason"; "" if forward ended.

    Relies on `GraphModule.compile_subgraph_reason`, which Dynamo sets for `torch._dynamo.explain`:
    `.graph_break`, `.reason` and `.user_stack`, the same from torch 2.11 to 2.13.
    """
    why = getattr(module, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return ""
    where = why.user_stack[-1] if why.user_stack else None
    place = f"{where.filename}:{where.lineno}" if where else "unknown place"
    return f"{place}: {why.reason.strip().splitlines()[0]}"


def branches_on_data(reason: str) -> bool:
    """Whether a break stands where Python asks for a tensor's content to decide what comes next.

    Relies on Dynamo's words: a headline from torch 2.7 on, `generic_jump` inside a piece, and the
    symbolic shapes' "data-dependent expression" for a number taken out of a tensor.
    """
    said = ("Data-dependent branching", "generic_jump", "data-dependent expression")
    return any(words in reason for words in said)


def no_fake_mode() -> AbstractContextManager[Any]:
    """Leaves the fake-tensor mode, to make a real tensor while a graph is being compiled."""
    return unset_fake_temporarily()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, for fake tensors too.

    Relies on `UntypedStorage._cdata`, which torch itself uses for this in `StorageWeakRef`.
    """
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def plain_eager() -> Iterator[None]:
    """Operators run for real and as they are: no mode of the caller's, no autocast, no autograd.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (fake, functional, proxy and
    user modes), `torch._C.DisableTorchFunction` (default-device mode) and
    `torch._C._DisableAutocast`, which AOTAutograd itself runs under.
    """
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


def named_arguments(target: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by their names in the operator's schema; empty if it has none.

    Relies on `OpOverload._schema`.
    """
    if not isinstance(target, OpOverload):
        return {}
    return dict(zip((a.name for a in target._schema.arguments), args, strict=False))


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step, without the hooks of people, schedulers and profilers.

    Relies on `Optimizer` wrapping its class's `step` once and marking the wrapper `hooked`.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return functools.partial(step, optimizer)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages of their own behind a tensor: of a sharded one the local shard.

    Relies on the `__tensor_flatten__` protocol of tensor subclasses.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [t for name in names for t in inner_tensors(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def profiler_running() -> bool:
    """Whether a profiler records this thread: a second one would end the first without a word.

    Relies on `torch._C._autograd._profiler_enabled`.
    """
    return bool(torch._C._autograd._profiler_enabled())
