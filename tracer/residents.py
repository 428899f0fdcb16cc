"""Bytes held during the whole step: parameters, buffers, gradients, inputs, optimizer state.

Storages count once, however many tensors share them. State that an optimizer has not made yet is
found by running its step on meta tensors: real code, no memory.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tracer.costs import storage_bytes
from tracer.errors import PlannerError
from tracer.torch_private import TorchDispatchMode, bare_step, inner_tensors, storage_key

Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
"""An optimizer, its class, or whatever makes one from a list of parameters."""


def resident_bytes(
    model: torch.nn.Module,
    inputs: object,
    optimizer: Optimizer | None = None,
    *,
    allocated: Callable[[int], int] = int,
) -> tuple[tuple[str, int], ...]:
    """What is held around and during the step: pairs of (name, bytes), empty ones left out.

    Args:
        model: its parameters, buffers and existing gradients. It may lie on the meta device.
        inputs: the example inputs: tensors in containers and dataclasses.
        optimizer: its state; what it has not made yet is predicted.
        allocated: bytes that the allocator counts for a request of so many.

    Raises:
        PlannerError: the optimizer's state cannot be predicted.
    """
    seen = _Storages(allocated)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [
        ("parameters", seen.add(model.parameters())),
        ("buffers", seen.add(model.buffers())),
        ("gradients", seen.add(gradients)),
        ("inputs", seen.add(_tensors(inputs))),
        ("optimizer state", _state_bytes(model, optimizer, seen) if optimizer is not None else 0),
    ]
    return tuple((name, nbytes) for name, nbytes in found if nbytes)


def optimizer_step_bytes(
    model: torch.nn.Module,
    optimizer: Optimizer,
    device: torch.device | None = None,
    *,
    allocated: Callable[[int], int] = int,
) -> int:
    """Most bytes that `optimizer.step()` holds beyond parameters, gradients and its state.

    Args:
        model: its parameters are what is optimized if the optimizer does not exist yet.
        optimizer: as for `resident_bytes`.
        device: where the step will run, if not where the parameters lie: the kernels differ.
        allocated: as for `resident_bytes`.

    Raises:
        PlannerError: the optimizer's step cannot be run on meta tensors.
    """
    groups, twin = _twin(optimizer, _trainable(model))
    where = device or next((p.device for g in groups for p in g["params"]), torch.device("cpu"))
    if groups and all(g.get("fused") for g in groups):
        return 0  # one kernel reads and writes everything in place
    for group in twin.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = where.type == "cuda"  # what torch chooses
    _step(twin)  # makes the state
    counter = _Counter(allocated)
    with counter:
        _step(twin)
    return counter.peak


def _state_bytes(model: torch.nn.Module, optimizer: Optimizer, seen: _Storages) -> int:
    existing, missing = 0, _trainable(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        existing = seen.add(_tensors(tuple(optimizer.state.values())))
        members = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        missing = [p for p in members if not list(_tensors(optimizer.state.get(p, {})))]
    if not missing:
        return existing
    _, twin = _twin(optimizer, missing)
    _step(twin)
    return existing + seen.add(_tensors(tuple(twin.state.values())))


def _twin(
    optimizer: Optimizer, parameters: list[torch.nn.Parameter]
) -> tuple[list[dict[str, Any]], torch.optim.Optimizer]:
    """The groups as they are, and an optimizer of the same kind over meta parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        original, stand_ins = optimizer, {p: p for p in parameters}
    else:
        original, stand_ins = _constructed(optimizer, parameters)
    twin = copy.copy(original)
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in original.param_groups:
        members = [p for p in group["params"] if p in stand_ins]
        metas = [_meta(stand_ins[p]) for p in members]
        twin.param_groups.append({**_plain_settings(group), "params": metas})
        for old, new in zip(members, metas, strict=True):
            if old in original.state:
                twin.state[new] = {k: _meta_state(v) for k, v in original.state[old].items()}
    return original.param_groups, twin


def _constructed(
    make: Callable[..., torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """A new optimizer, and for each of its parameters the one of the model."""
    first: Exception | None = None
    for stand_in in (_meta, _flat):  # constructors may refuse the meta device, fused ones do
        fakes = [stand_in(p) for p in parameters]
        try:
            return make(fakes), dict(zip(fakes, parameters, strict=True))
        except Exception as error:  # whatever a constructor may say
            first = first or error
    assert first is not None
    raise _refusal(make, first) from first


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fused and capturable kernels refuse the meta device; their state is the same."""
    changed = {k: False for k in ("fused", "capturable") if group.get(k)}
    return {**group, **changed}


def _flat(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Of the same shape, on the CPU, with a single element behind it."""
    shape, dtype = inner_tensors(parameter)[0].shape, parameter.dtype
    return torch.nn.Parameter(torch.zeros((), dtype=dtype, device="cpu").expand(shape))


def _meta(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    local = inner_tensors(parameter)[0]
    twin = torch.nn.Parameter(torch.empty_like(local, device="meta"), parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin


def _meta_state(value: Any) -> Any:
    """Counters of steps stay numbers, the rest loses its content."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value.clone() if isinstance(value, torch.Tensor) else value
    return torch.empty_like(inner_tensors(value)[0], device="meta")


def _step(twin: torch.optim.Optimizer) -> None:
    try:
        with _Ones():
            bare_step(twin)()
    except Exception as error:
        raise _refusal(twin, error) from error


def _refusal(optimizer: Optimizer, error: Exception) -> PlannerError:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return PlannerError(
        f"optimizer=: the state of {kind.__name__} cannot be predicted, since its step does not "
        f"run on meta tensors ({error}); pass an optimizer that has taken a step, or leave it out"
    )


class _Storages:
    """Counts each storage once."""

    def __init__(self, allocated: Callable[[int], int]) -> None:
        self._allocated = allocated
        self._seen: dict[int, torch.Tensor] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages that were not seen before."""
        total = 0
        for tensor in (t for outer in tensors for t in inner_tensors(outer)):
            key = storage_key(tensor)
            if key not in self._seen:
                self._seen[key] = tensor  # held, so that no other storage gets its number
                total += self._allocated(storage_bytes(tensor))
        return total


class _Ones(TorchFunctionMode):
    """Meta tensors have no numbers: where an optimizer asks for one it is 1."""

    _KINDS: Mapping[Any, Any] = {
        torch.Tensor.item: 1.0,
        torch.Tensor.__float__: 1.0,
        torch.Tensor.__int__: 1,
        torch.Tensor.__bool__: True,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._KINDS and args[0].is_meta:
            return self._KINDS[func]
        return func(*args, **(kwargs or {}))


class _Counter(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and their peak."""

    def __init__(self, allocated: Callable[[int], int]) -> None:
        super().__init__()
        self._allocated = allocated
        self.held = self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {storage_key(t) for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if storage_key(tensor) not in known:
                self._watch(tensor)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        key, nbytes = storage_key(tensor), self._allocated(storage_bytes(tensor))
        if key in self._watched:
            return
        self.held += nbytes
        self.peak = max(self.peak, self.held)

        def freed(_: object) -> None:
            self.held -= nbytes
            del self._watched[key]

        self._watched[key] = weakref.ref(tensor.untyped_storage(), freed)


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    """The tensors in containers and dataclasses."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        yield from _tensors(tuple(thing.values()))
    elif isinstance(thing, list | tuple | set | frozenset):
        for item in thing:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from _tensors(tuple(vars(thing).values()))
