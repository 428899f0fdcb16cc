"""The only file in `tracer` that touches private names of torch. Each says what it relies on."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, TorchRuntimeError
from torch._functorch.aot_autograd import aot_module_simplified
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "CAPTURE_SWITCHES",
    "DYNAMO_ERRORS",
    "UNSAFE_VIEW",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "aot_joint",
    "branches_on_data",
    "break_after",
    "break_of",
    "capture_is_off",
    "depends_on_data",
    "dynamo_settings",
    "forget_code",
    "forward_failed",
    "hooks_of",
    "is_symbolic",
    "joint_fake_mode",
    "layouts_as_run",
    "linear_in",
    "mark_varying",
    "meta_as_cpu",
    "named_arguments",
    "no_fake_mode",
    "number_of",
    "ordinary_stance",
    "plain_eager",
    "recompile_limit_hit",
    "storage_key",
    "tensor_over",
    "tree_leaves",
    "tree_map",
    "unmark_varying",
]

# What Dynamo raises. No `TorchDynamoException` is that it holds as many graphs as it may, nor that
# `if tensor.item():` asks for a number.
DYNAMO_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode)
# As many graphs as Dynamo may hold of one model while a new one is captured.
GRAPHS = 64

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


@contextmanager
def dynamo_settings(*, recurrent: bool = False) -> Iterator[None]:
    """Settings under which we trace.

    Relies on `torch._dynamo.config` names that exist from torch 2.11 to 2.15. A recompile limit
    would make Dynamo run the model unplanned: reaching it raises instead. Log messages written
    in a forward cannot be part of a graph; they are left out rather than refused. Numbers and sizes
    out of tensors end a piece: it must be priced before it runs.

    With `recurrent`, recurrent layers are traced step by step, which Dynamo refuses by default
    because the graphs are long. oneDNN is off meanwhile (`torch._C._set_mkldnn_enabled`):
    AOTAutograd records its kernel for a whole layer without what the backward of it reads.
    """
    _break_at_lengths()
    config = torch._dynamo.config
    ignored = "ignore_logging_functions"  # called ignore_logger_methods before torch 2.12
    if not hasattr(config, ignored):
        ignored = "ignore_logger_methods"
    loggers = {f for n, f in vars(logging.Logger).items() if callable(f) and not n.startswith("_")}
    settings = {
        "recompile_limit": GRAPHS,
        "accumulated_recompile_limit": 4096,
        "fail_on_recompile_limit_hit": True,
        "allow_rnn": recurrent,
        "capture_scalar_outputs": False,  # in pieces; one graph always captures them
        "capture_dynamic_output_shape_ops": False,
        ignored: getattr(config, ignored) | loggers,
    }
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled and not recurrent)
    try:
        with config.patch(settings):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@functools.cache
def _break_at_lengths() -> None:
    """Packed sequences break the graph, as from torch 2.13 on.

    Before, Dynamo runs `torch._VF._pad_packed_sequence` on fake tensors, which have no lengths to
    read, and says that the forward fails. Relies on `torch._dynamo.disallow_in_graph`, which holds
    for the process.
    """
    if torch.__version__ < "2.13":
        torch._dynamo.disallow_in_graph(torch._VF._pad_packed_sequence)


UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view that autograd takes for a result of its own; torch's matrix products end with it."""

CAPTURE_SWITCHES = "TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or torch._dynamo.config.disable"


def capture_is_off() -> bool:
    """Whether Dynamo was switched off, so that `torch.compile` returns what it is given.

    Relies on `torch._dynamo.config.disable` (and TORCH_COMPILE_DISABLE, which sets it) and on the
    environment variable that `torch._dynamo.optimize` looks at.
    """
    return bool(torch._dynamo.config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def ordinary_stance() -> AbstractContextManager[Any]:
    """Captured graphs run, whatever `torch.compiler.set_stance` says to other compiled code.

    "force_eager" and "eager_on_recompile" would run the model itself: a step without its plan.
    Relies on `torch._dynamo.eval_frame._stance`, a dataclass since torch 2.6.
    """
    stance = torch._dynamo.eval_frame._stance
    if stance == type(stance)():
        return nullcontext()
    return torch.compiler.set_stance("default")  # type: ignore[no-any-return]


def hooks_of(model: torch.nn.Module) -> Callable[[], tuple[Any, ...]]:
    """A function that gives the hooks which are there: of the model's modules now, and of all.

    Dynamo leaves out the guards that would see a hook put on a module later, and its own cost ten
    times as much as a look at these dictionaries. Relies on the names that `nn.Module` keeps its
    hooks under, where a hook put on gets a number of its own, the same since torch 2.0.
    """
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    kept = [(vars(part), name) for part in model.modules() for name in names]
    kept += [(vars(torch.nn.modules.module), "_global" + name) for name in names]
    return lambda: tuple(number for where, name in kept if where[name] for number in where[name])


def forget_code(model: torch.nn.Module) -> None:
    """Dynamo looks anew at the forwards of a model's modules and at the rests of them.

    It takes no second look at code that raised while it was traced in pieces, and lets it run as
    plain Python for ever. Relies on `torch._dynamo.convert_frame.input_codes`, all that it has
    looked at, on a rest keeping the file of its whole, and on `reset_code`; torch 2.11 to 2.14.
    """
    forwards = (getattr(type(m).forward, "__code__", None) for m in model.modules())
    files = {code.co_filename for code in forwards if code is not None}
    with torch._dynamo.convert_frame.compile_lock:
        for reference in torch._dynamo.convert_frame.input_codes.seen:
            code = reference()
            if code is not None and code.co_filename in files:
                torch._C._dynamo.eval_frame.reset_code(code)


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


def depends_on_data(module: fx.GraphModule) -> str:
    """Where a Dynamo graph takes a number or a size out of a tensor, as "file:line: reason".

    "" if it does not. Relies on `meta["example_value"]` and on `free_unbacked_symbols` of
    `torch.fx.experimental.symbolic_shapes`: such a number is a symbol that no argument tells.
    """
    for node in module.graph.nodes:
        if free_unbacked_symbols(node.meta.get("example_value")):
            places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
            where = f"{places[-1][0]}:{places[-1][1]}" if places else "unknown place"
            return f"{where}: a number or a size comes out of a tensor ({node.name})"
    return ""


def branches_on_data(reason: str) -> bool:
    """Whether a break stands where Python asks for a tensor's content to decide what comes next.

    Relies on Dynamo's words: a headline from torch 2.7 on, `generic_jump` inside a piece, and the
    symbolic shapes' "guard on data-dependent expression" for a number taken out of a tensor, which
    is a branch where the expression compares.
    """
    if any(words in reason for words in ("Data-dependent branching", "generic_jump")):
        return True
    guarded = re.search(r"guard on data-dependent expression (.+?) \(unhinted", reason)
    return guarded is not None and bool(re.search(r"[<>]|\b(Eq|Ne)\(", guarded[1]))


def mark_varying(tensor: torch.Tensor, dim: int) -> None:
    """A capture may leave this size open. Relies on `torch._dynamo.maybe_mark_dynamic`."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def unmark_varying(tensor: torch.Tensor) -> None:
    """Undoes `mark_varying`. Relies on the attributes that it sets."""
    for name in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"):
        if hasattr(tensor, name):
            delattr(tensor, name)


def recompile_limit_hit(error: Exception) -> bool:
    """Whether Dynamo holds as many graphs as it may. Relies on `FailOnRecompileLimitHit`."""
    return isinstance(error, FailOnRecompileLimitHit)


@contextmanager
def meta_as_cpu() -> Iterator[None]:
    """Fake tensors that would lie on the meta device lie on the CPU: no memory, but real kernels.

    On the meta device torch decomposes attention into products that no real device would hold, has
    no derivative of the cross-entropy's last step, and makes constants that Dynamo refuses. Relies
    on `FakeTensor.__new__` being given its device as an argument, the same since torch 2.0.
    """
    made = FakeTensor.__new__

    def elsewhere(argument: Any) -> Any:
        is_meta = isinstance(argument, str | torch.device) and torch.device(argument).type == "meta"
        return torch.device("cpu") if is_meta else argument

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        moved = {name: elsewhere(value) for name, value in kwargs.items()}
        return made(cls, *map(elsewhere, args), **moved)

    FakeTensor.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__new__ = made  # type: ignore[method-assign]


@contextmanager
def layouts_as_run() -> Iterator[None]:
    """The fake group norm keeps channels-last layouts on the CPU, as the kernel does.

    That of torch 2.14 looks at the device, which is meta while it runs, and takes that for a GPU.
    Operators behind it would be priced, and views made, for a layout that they do not meet. Relies
    on `op_implementations_dict` of `torch._subclasses.fake_impls`, in which torch itself looks up
    such rules from 2.11 to 2.14; only what is cached under no rule would pass it by.
    """
    if not _group_norm_forgets_layouts():
        yield
        return
    rules = fake_impls.op_implementations_dict
    rules[_GROUP_NORM] = _group_norm_as_run
    try:
        yield
    finally:
        rules.pop(_GROUP_NORM, None)


_GROUP_NORM = torch.ops.aten.native_group_norm.default


@functools.cache
def _group_norm_forgets_layouts() -> bool:
    with plain_eager():
        x = torch.ones(1, 4, 2, 2, device="cpu").to(memory_format=torch.channels_last)
        made = _GROUP_NORM(x, None, None, 1, 4, 4, 2, 1e-5)[0]
        with FakeTensorMode() as mode:
            fake = _GROUP_NORM(mode.from_tensor(x), None, None, 1, 4, 4, 2, 1e-5)[0]
    FakeTensorMode.cache_clear()
    return bool(made.stride() != fake.stride())


def _group_norm_as_run(mode: FakeTensorMode, op: Any, x: torch.Tensor, *more: Any) -> Any:
    rule = fake_impls.op_implementations_dict.pop(op)
    try:
        with mode:
            made, *statistics = op(x, *more)
            channels_last = x.is_contiguous(memory_format=torch.channels_last)
            if x.device.type == "cpu" and channels_last and not x.is_contiguous():
                made = made.contiguous(memory_format=torch.channels_last)
    finally:
        fake_impls.op_implementations_dict[op] = rule
    return (made, *statistics)


def no_fake_mode() -> AbstractContextManager[Any]:
    """Leaves the fake-tensor mode, to make a real tensor while a graph is being compiled."""
    return unset_fake_temporarily()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, for fake tensors too.

    Relies on `UntypedStorage._cdata`, which torch itself uses for this in `StorageWeakRef`.
    """
    return int(tensor.untyped_storage()._cdata)


def is_symbolic(item: Any) -> bool:
    """Whether this is a number that stands for a size not known yet."""
    return isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool))


def linear_in(item: Any) -> tuple[str, int, int] | None:
    """(symbol, scale, shift) if a size is scale * symbol + shift with whole numbers, else None.

    Relies on `SymInt.node.expr`, a sympy expression.
    """
    if not isinstance(item, torch.SymInt):
        return None
    expression = item.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) != 1 or not expression.is_polynomial(symbols[0]):
        return None
    shift, scale = expression.subs(symbols[0], 0), expression.coeff(symbols[0])
    if not (scale.is_Integer and shift.is_Integer and scale > 0):
        return None
    is_linear = expression == scale * symbols[0] + shift
    return (str(symbols[0]), int(scale), int(shift)) if is_linear else None


def number_of(item: Any, sizes: Mapping[str, int]) -> Any:
    """A number for a symbolic one, given its symbols' values; None if others occur in it.

    Relies on `SymInt.node.expr`, as `linear_in`.
    """
    if not is_symbolic(item):
        return item
    expression = item.node.expr
    if any(str(s) not in sizes for s in expression.free_symbols):
        return None
    value = expression.xreplace({s: sizes[str(s)] for s in expression.free_symbols})
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(item)](value)


def joint_fake_mode() -> FakeTensorMode:
    """A mode for fake tensors of known sizes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tensor_over(
    mode: FakeTensorMode,
    like: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
    nbytes: int,
    storage: torch.UntypedStorage | None,
) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """A fake tensor of these sizes, over a storage that is given or made; also the storage.

    Relies on `FakeTensor(mode, meta tensor, device)`, which shares the meta tensor's storage.
    """
    with no_fake_mode():
        if storage is None:
            storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        bare = torch.empty(0, dtype=like.dtype, device="meta")
        bare.set_(storage, offset, tuple(sizes), tuple(strides))
        bare.requires_grad_(like.requires_grad and bare.is_floating_point())
    return FakeTensor(mode, bare, like.device), storage


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

    Relies on the `__tensor_flatten__` protocol of tensor subclasses; among the attributes that it
    names may be others than tensors (the device mesh of a DTensor, since torch 2.13).
    """
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [t for i in inner if isinstance(i, torch.Tensor) for t in inner_tensors(i)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def profiler_running() -> bool:
    """Whether a profiler records this thread: a second one would end the first without a word.

    Relies on `torch._C._autograd._profiler_enabled`.
    """
    return bool(torch._C._autograd._profiler_enabled())
