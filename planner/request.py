"""What people ask for, checked and brought into one form before any work starts."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.backends import BACKENDS, EAGER
from planner.problem import Problem
from planner.solvers import SOLVERS
from runtime.torch_private import installed_call, tree_leaves
from tracer.errors import InvalidBudget, PlannerError, UnknownHardware
from tracer.graph import ComputationGraph, Kind

# Held back from "auto": the allocator's fragmentation, and what other libraries put on the device.
_RESERVE = 0.08

_MOST_GB = 1e6  # more than any machine has: a budget in bytes


@dataclass(frozen=True)
class Request:
    """The arguments of `plan`, valid; see `checked` for arguments as people give them.

    Attributes:
        budget_bytes: None for "auto", which is looked up when the plan is made.
        dynamic: for arguments of forward, by name or position, the largest size of dimensions.
        in_flight: micro-batches between forward and backward at one time (pipeline stages).
    """

    budget_bytes: int | None
    optimizer: Any = None
    device: torch.device | None = None
    hardware: str | None = None
    solver: str = "auto"
    time_limit: float = 60.0
    backend: str = EAGER
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    dynamic: Mapping[str | int, Mapping[int, int]] = field(default_factory=dict)
    in_flight: int = 1


@dataclass(frozen=True)
class Inputs:
    """One batch: how the model's forward is called."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in it, in containers too."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [t for t in leaves if isinstance(t, torch.Tensor)]


def checked(
    *,
    budget_gb: float | str,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    hardware: str | None = None,
    solver: str = "auto",
    time_limit: float = 60.0,
    backend: str = EAGER,
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    dynamic: Mapping[str | int, Mapping[int, int]] | None = None,
    in_flight: int = 1,
) -> Request:
    """The arguments of `planner.plan`, which says what they are, as a request.

    Raises:
        InvalidBudget, UnknownHardware, PlannerError: an argument makes no sense.
    """
    if isinstance(optimizer, str):
        raise PlannerError(
            f"optimizer={optimizer!r} is text: pass an optimizer or its class, such as "
            "torch.optim.AdamW"
        )
    where = check_device(device, here=hardware is None)
    return Request(
        budget_bytes(budget_gb),
        optimizer,
        where,
        hardware,
        one_of("solver", solver, tuple(SOLVERS)),
        _positive("time_limit", time_limit),
        one_of("backend", backend, BACKENDS),
        patterns(keep),
        patterns(recompute),
        dict(dynamic or {}),
        _count("in_flight", in_flight),
    )


def one_of(argument: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value, if it is allowed."""
    if value not in allowed:
        raise PlannerError(f"{argument}={value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


def patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def _positive(argument: str, value: float) -> float:
    if not value > 0:
        raise PlannerError(f"{argument}={value!r} must be a positive number of seconds")
    return float(value)


def _count(argument: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlannerError(f"{argument}={value!r} must be a whole number of at least 1")
    return value


def budget_bytes(budget_gb: float | str) -> int | None:
    """Bytes of a budget in gigabytes (1e9); None for "auto"."""
    if budget_gb == "auto":
        return None
    number = isinstance(budget_gb, (int, float)) and not isinstance(budget_gb, bool)
    if not number or not math.isfinite(float(budget_gb)) or float(budget_gb) <= 0:
        raise InvalidBudget(
            f"budget_gb={budget_gb!r} is not a budget: pass gigabytes (1e9 bytes) as a positive "
            'number, such as budget_gb=32, or budget_gb="auto"'
        )
    if float(budget_gb) > _MOST_GB:
        raise InvalidBudget(
            f"budget_gb={budget_gb!r} is more than a petabyte: it is in gigabytes (1e9 bytes), not "
            "in bytes"
        )
    return round(float(budget_gb) * 1e9)


def inputs_of(
    model: torch.nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> Inputs | None:
    """The example batch, from the arguments or from the model; None if there is none."""
    if example_inputs is None and example_kwargs is None:
        example_inputs = getattr(model, "example_input_array", None)
        if example_inputs is None:
            return None
    kwargs = dict(example_kwargs or {})
    if example_inputs is None:
        return Inputs((), kwargs)
    if isinstance(example_inputs, Mapping):
        if kwargs:
            raise PlannerError(
                "example_inputs is a mapping and example_kwargs is given too: pass keywords in one "
                "of them, positional arguments as a tuple in example_inputs"
            )
        return Inputs((), dict(example_inputs))
    if isinstance(example_inputs, tuple):
        return Inputs(example_inputs, kwargs)
    return Inputs((example_inputs,), kwargs)


def sizes_by_tensor(
    model: torch.nn.Module, inputs: Inputs, dynamic: Mapping[str | int, Mapping[int, int]]
) -> list[tuple[torch.Tensor, int, int]]:
    """What `dynamic` says, as (tensor of the batch, dimension, largest size)."""
    if not dynamic:
        return []
    names = list(inspect.signature(model.forward).parameters)
    given: dict[str | int, Any] = dict(enumerate(inputs.args))
    given.update(zip(names, inputs.args, strict=False))
    given.update(inputs.kwargs.items())
    found = []
    for name, sizes in dynamic.items():
        tensor = given.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise PlannerError(
                f"dynamic={name!r} names no tensor of the example batch; it has "
                f"{', '.join(repr(n) for n, t in given.items() if isinstance(t, torch.Tensor))}"
            )
        for dim, size in sizes.items():
            if not -tensor.dim() <= dim < tensor.dim() or size < tensor.shape[dim]:
                raise PlannerError(
                    f"dynamic={{{name!r}: {{{dim}: {size}}}}}: the example has shape "
                    f"{tuple(tensor.shape)}; give one of its dimensions, and the largest size that "
                    "it will have"
                )
            found.append((tensor, dim % tensor.dim(), size))
    return found


def check_inputs(model: torch.nn.Module, inputs: Inputs) -> None:
    """The batch must fit the signature of the model's forward."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # no signature to be had; tracing will tell
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise PlannerError(
            f"example_inputs does not fit {type(model).__name__}.forward{signature}: {error}. Pass "
            "what your loop passes to model(...): not the targets, if the loss is computed outside"
            f"{list_hint(inputs)}"
        ) from error


def list_hint(inputs: Inputs) -> str:
    """What to say, if something fails, to people who pass a list as their data loader made it."""
    if len(inputs.args) == 1 and isinstance(inputs.args[0], list):
        return ". A list is one argument of forward: for several, pass a tuple"
    return ""


def without_labels(model: torch.nn.Module, inputs: Inputs | None) -> tuple[str, ...]:
    """A note, if the forward would compute the loss and is not given what it needs for it."""
    try:
        bound = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return ()
    if "labels" not in bound.signature.parameters or "labels" in bound.arguments:
        return ()
    return ("forward takes labels and got none: a loss that it computes is not in this plan",)


def check_model(model: Any) -> None:
    """The model must be a module with something to train."""
    if isinstance(model, type):
        raise PlannerError(f"model is the class {model.__name__}: pass an instance of it")
    if not isinstance(model, torch.nn.Module):
        raise PlannerError(
            f"model is a {type(model).__name__}, not a torch.nn.Module; for a function, wrap it in "
            "a module that calls it"
        )
    for name, part in model.named_modules():
        if name and installed_call(part) is not None and hasattr(part, "plan"):
            raise PlannerError(
                f"model.{name} has a plan of its own: remove it, and plan the whole model "
                f'(model.get_submodule("{name}").plan.remove())'
            )
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise PlannerError(
            f"model has no parameter that needs a gradient ({len(parameters)} parameters, all with "
            "requires_grad=False): there is no backward pass to plan"
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model's parameters are; CPU if it has none."""
    return next((t.device for t in model.parameters()), torch.device("cpu"))


def check_device(device: str | torch.device | None, *, here: bool = True) -> torch.device | None:
    """A device; `here` says that it must be on this machine."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UnknownHardware(f"device={device!r} is not a device: {error}") from error
    if not here:
        return found
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnknownHardware(
            f'device={device!r} was asked for, but torch sees no CUDA device here; pass hardware="'
            'a100-80gb" (or another profile) to plan for a device that is elsewhere'
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UnknownHardware(
            f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return found


def free_bytes(device: torch.device, held: int) -> int:
    """What "auto" means: free memory and what the step already holds, less a reserve of 8 %."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    return int((free + held) * (1 - _RESERVE))


def reserved_total(memory_bytes: int) -> int:
    """The budget of a whole device: its memory less the same reserve."""
    return int(memory_bytes * (1 - _RESERVE))


def problems_of(
    graphs: Sequence[ComputationGraph],
    budget: int,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
) -> list[Problem]:
    """What a solver is asked about each of the graphs of a step, with what people pinned.

    A pattern is a module path ("encoder.layer.0" stands for everything below it, too) or a shell
    pattern ("encoder.layer.*.attention").

    Raises:
        PlannerError: a pattern matches in none of the graphs.
    """
    kept = _matching(graphs, keep, "keep")
    dropped = _matching(graphs, recompute, "recompute")
    return [
        Problem(graph, budget, one, _removable(graph, other))
        for graph, one, other in zip(graphs, kept, dropped, strict=True)
    ]


def _matching(
    graphs: Sequence[ComputationGraph], patterns: Sequence[str], argument: str
) -> list[frozenset[int]]:
    """Forward values made in modules whose path matches a pattern, for each graph."""
    found: list[set[int]] = [set() for _ in graphs]
    for pattern in patterns:
        values = [_made_in(graph, pattern) for graph in graphs]
        if not any(values):
            raise PlannerError(_no_match(graphs, pattern, argument))
        for one, more in zip(found, values, strict=True):
            one |= more
    return [frozenset(one) for one in found]


def _made_in(graph: ComputationGraph, pattern: str) -> set[int]:
    operations = graph.operations[: graph.boundary]
    return {v for op in operations if _matches(op.module, pattern) for v in op.outputs}


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + ".*")


def _no_match(graphs: Sequence[ComputationGraph], pattern: str, argument: str) -> str:
    paths = sorted({op.module for graph in graphs for op in graph.operations} - {""})
    near = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.3) or paths[:5]
    return (
        f"{argument}={pattern!r} matches no module that computes anything; near names: "
        f"{', '.join(near) or 'none'}"
    )


def _removable(graph: ComputationGraph, values: frozenset[int]) -> frozenset[int]:
    """Those that can be absent at the boundary: made again by an operation that may run twice."""
    result = set()
    for v in values & frozenset(graph.candidates):
        producer = graph.values[v].producer
        assert producer is not None
        if graph.operations[producer].recomputable and graph.values[v].kind is Kind.ACTIVATION:
            result.add(v)
    return frozenset(result)
