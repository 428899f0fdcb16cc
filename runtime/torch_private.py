"""The only file in `runtime` that touches private names of torch. Each says what it relies on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import fx
from torch._ops import OpOverload
from torch._prims import rng_prims
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

run_and_save_rng_state: Callable[..., Any] = rng_prims.run_and_save_rng_state
"""Higher-order operator (op, *args) -> (state before, results): since torch 2.1."""

run_with_rng_state: Callable[..., Any] = rng_prims.run_with_rng_state
"""Higher-order operator (state, op, *args) -> results, leaving the generator as it was."""

__all__ = [
    "BoxedCodeGen",
    "OpOverload",
    "active_data_parallel",
    "autocast_off",
    "backward_hooks",
    "backward_pass",
    "base_of",
    "decomposed",
    "fake_mode_of",
    "graph_kept",
    "inductor_compile",
    "install_call",
    "installed_call",
    "is_overload",
    "job_store",
    "lint",
    "made_by_aot",
    "plain_call",
    "recorded_at",
    "recorded_next",
    "remove_call",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "same_view",
    "saved_by_autograd",
    "set_backward_hooks",
    "sharded_units",
    "transformed",
    "tree_flatten",  # these of torch.utils._pytree: outputs of any shape, the same since 2.0
    "tree_leaves",
    "tree_unflatten",
    "version_of",
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


def backward_pass() -> int:
    """Number of the running backward pass; -1 outside of one.

    Relies on `torch._C._current_graph_task_id`, as torch's own multi-gradient hooks do.
    """
    return int(torch._C._current_graph_task_id())


def made_by_aot(node: Any) -> bool:
    """Whether an autograd node is one of AOTAutograd's: a captured graph in the caller's graph.

    Relies on the name of the `torch.autograd.Function` in it, `CompiledFunction`, since torch 2.0.
    """
    return type(node).__name__ == "CompiledFunctionBackward"


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place. Relies on `Tensor._version`, autograd's counter."""
    return int(tensor._version)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of. Relies on `Tensor._base`."""
    return tensor._base


def same_view(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The same view of another tensor. Relies on `Tensor._view_func`, as AOTAutograd does."""
    made: torch.Tensor = view._view_func(base)  # type: ignore[attr-defined]
    return made


_NO_HOOK = -1


def transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is at work.

    Relies on functorch's stack of interpreters and on `torch.autograd.forward_ad._current_level`,
    which is -1 outside of `dual_level`; both since torch 2.0.
    """
    stack = torch._C._functorch.peek_interpreter_stack()
    return stack is not None or torch.autograd.forward_ad._current_level >= 0


def install_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Makes `module(...)` run `call` instead.

    Relies on `nn.Module._compiled_call_impl`, which `nn.Module.compile` sets: it is left out when a
    module is pickled or deep-copied, and no key of `state_dict` changes.

    A function that somebody compiles and that calls the module must not go past `call`: Dynamo
    inlines `forward` for a module without hooks, and looks at `_compiled_call_impl` for others. An
    entry that belongs to no hook is enough: `_forward_hooks_with_kwargs` is read by the hooks' ids.
    """
    module._compiled_call_impl = call
    module._forward_hooks_with_kwargs[_NO_HOOK] = True


def remove_call(module: torch.nn.Module) -> None:
    """Undoes `install_call`."""
    module._compiled_call_impl = None
    module._forward_hooks_with_kwargs.pop(_NO_HOOK, None)


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


def recorded_at(tensor: torch.Tensor) -> int:
    """When autograd recorded how a tensor was made: the numbers rise. -1 for one made otherwise.

    Relies on `torch.autograd.graph.Node._sequence_nr`, which counts per thread, the same since
    torch 2.0.
    """
    node: Any = tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())


def recorded_next() -> int:
    """The number that `recorded_at` gives at least for what is recorded from now on."""
    with torch.enable_grad():
        return recorded_at(torch.empty((), requires_grad=True, device="cpu").view(()))


def installed_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `install_call` put in place, if anything."""
    return module._compiled_call_impl


def job_store() -> Any:
    """The key-value store that the ranks of a job share; None outside of a job.

    Relies on `torch.distributed.distributed_c10d._get_default_store`, the same since torch 1.9.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()


def active_data_parallel() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel module whose forward runs, if one does.

    Relies on `DistributedDataParallel._active_ddp_module`, which its forward sets for Dynamo.
    """
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        gathered_bytes: all parameters whole, in the dtype they are gathered in; gradient_bytes:
            their gradients before reduction; reduce_bytes: the input of the reduce-scatter.
        shard_bytes: this rank's part of the gradients.
        reshards: whether parameters are freed after forward; reduces: whether gradients are reduced
            in this backward (`set_requires_gradient_sync`); is_root: of the outermost module.
    """

    gathered_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    shard_bytes: int
    reshards: bool
    reduces: bool
    is_root: bool


def sharded_units(model: torch.nn.Module) -> list[Unit]:
    """The units of FSDP2 in a model.

    Relies on `FSDPModule._get_fsdp_state()` and, of the state, `_fsdp_param_groups` (a single
    `_fsdp_param_group` before torch 2.12), `_mp_policy` and `_auto_reshard_after_forward`; of a
    group, `fsdp_params`, `_reshard_after_forward` and `reduce_grads`.
    """
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    found: list[Unit] = []
    seen: list[Any] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if any(state is s for s in seen):
            continue  # one unit of several modules
        root, groups = not seen, getattr(state, "_fsdp_param_groups", None)
        seen.append(state)
        if groups is None:
            groups = [g for g in (state._fsdp_param_group,) if g is not None]
        found += [_unit(state, group, root) for group in groups]
    return found


def _unit(state: Any, group: Any, is_root: bool) -> Unit:
    policy = state._mp_policy
    params = [p.sharded_param for p in group.fsdp_params]
    trained = [p for p in params if p.requires_grad]
    gathered = [(p.numel(), policy.param_dtype or p.dtype) for p in params]
    gradients = [(p.numel(), policy.param_dtype or p.dtype) for p in trained]
    reduced = [(p.numel(), policy.reduce_dtype or policy.param_dtype or p.dtype) for p in trained]
    local = [p.to_local() for p in trained]
    automatic = getattr(state, "_auto_reshard_after_forward", True)
    return Unit(
        _bytes_of(gathered),
        _bytes_of(gradients),
        _bytes_of(reduced),
        sum(t.numel() * t.element_size() for t in local),
        bool(group._reshard_after_forward) and not (is_root and automatic),
        bool(group.reduce_grads),
        is_root,
    )


def _bytes_of(sizes: list[tuple[int, torch.dtype]]) -> int:
    return sum(numel * dtype.itemsize for numel, dtype in sizes)


def set_activation_memory_budget(fraction: float) -> None:
    """For torch's own partitioner, to which plans are compared; for the rest of the process.

    Relies on the name of a setting of functorch, which torch's blog and forums tell people to use.
    """
    from torch._functorch import config

    config.activation_memory_budget = fraction


def set_fallback_random() -> None:
    """Makes Inductor draw the random numbers that eager draws; for the rest of the process."""
    from torch._inductor import config

    config.fallback_random = True


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The mode that fake tensors belong to; one of its own where there are none.

    Relies on `torch._guards.detect_fake_mode` and `torch._subclasses.FakeTensorMode`.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode

    return detect_fake_mode(list(values)) or FakeTensorMode()


def decomposed(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """Traces a function of fake tensors into the operators that Inductor lowers, in its order.

    Relies on `torch._inductor.decomposition.select_decomp_table`, on the setting `fallback_random`,
    with which it leaves random operators whole, and on `FakeTensorMode.allow_non_fake_inputs`,
    which lets a graph hold real tensors as constants.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(inputs)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with config.patch(fallback_random=True):
            table = dict(select_decomp_table())
            return make_fx(function, decomposition_table=table)(*inputs)
    finally:
        mode.allow_non_fake_inputs = before


def inductor_compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Lowers one graph; the result takes a list, which it empties as it goes.

    Its results have the strides of the graph's fake tensors. Relies on
    `torch._inductor.compile_fx.compile_fx_inner`, and on two entries in the `meta` of the output
    node, with which Inductor keeps strides. The same since torch 2.7.

    No plan counts copies into the layout that a convolution would like best, so there are none. For
    CPU, loops that have nothing to do with each other would share a function, as long as it has no
    more than `CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM` arguments, with the buffers of all allocated
    before it and freed after it; here each has its own (the same name from torch 2.11 to 2.14).
    Nor is memory kept from one buffer to a later one of its size, while other kernels run, nor are
    kernels put in another order, by an estimate that knows no workspace. And nothing is fused over
    a kernel that stands in between: one half would move ahead of it, or behind it, with what it
    makes or reads. `V.set_choices_handler` and, for the key of Inductor's cache, the setting
    `inductor_choices_class` are Inductor's own way to have a say in this.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = next(iter(graph.graph.find_nodes(op="output")))
    values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in output.args[0]]
    strides = [tuple(v.stride()) if _is_strided(v) else None for v in values]
    output.meta["user_visible_output_idxs"] = [i for i, s in enumerate(strides) if s is not None]
    output.meta["original_output_strides"] = strides
    settings = {
        "fallback_random": True,
        "layout_optimization": False,
        "allow_buffer_reuse": False,
        "reorder_for_peak_memory": False,
        "inductor_choices_class": in_order,
    }
    one_loop = patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0)
    with config.patch(settings), one_loop, V.set_choices_handler(in_order()):
        compiled: Callable[..., Any] = compile_fx_inner(graph, list(inputs))
    return compiled


def in_order() -> Any:
    """Choices of Inductor that fuse only what no other kernel stands between.

    Relies on `InductorChoices.can_fuse(scheduler, node1, node2, score)`, the same from torch 2.11
    to 2.14, on `ExternKernelSchedulerNode` being what Inductor calls and does not generate, and on
    `min_order`, the place of a scheduler's node among `Scheduler.nodes` before anything is fused.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    class InOrder(InductorChoices):
        def __init__(self) -> None:
            self.kernels: tuple[Any, list[int]] = (None, [])

        def can_fuse(self, scheduler: Any, node1: Any, node2: Any, score: int) -> bool:  # type: ignore[override]
            if self.kernels[0] is not scheduler:
                kernels = (n for n in scheduler.nodes if isinstance(n, ExternKernelSchedulerNode))
                self.kernels = scheduler, [n.min_order for n in kernels]
            before = [bisect_left(self.kernels[1], n.min_order) for n in (node1, node2)]
            return before[0] == before[1] and super().can_fuse(scheduler, node1, node2, score)

        def uuid(self) -> str:
            return "checkpoint-planner, in order"

    return InOrder()


def _is_strided(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
