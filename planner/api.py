"""`plan`: the function that people call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict, Unpack, overload

import torch

from planner.engine import Engine
from planner.pending import PendingPlan
from planner.plan import Plan
from planner.request import check_inputs, check_model, checked, inputs_of


class _Options(TypedDict, total=False):
    budget_gb: Required[float | str]
    optimizer: Any
    device: str | torch.device | None
    hardware: str | None
    solver: str
    time_limit: float
    backend: str
    keep: str | Sequence[str]
    recompute: str | Sequence[str]
    dynamic: Mapping[str | int, Mapping[int, int]] | None
    in_flight: int


@overload
def plan(
    model: torch.nn.Module,
    example_inputs: torch.Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[_Options],
) -> Plan: ...


@overload
def plan(
    model: torch.nn.Module,
    example_inputs: None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[_Options],
) -> Plan | PendingPlan: ...


def plan(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    budget_gb: float | str,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    hardware: str | None = None,
    solver: str = "auto",
    time_limit: float = 60.0,
    backend: str = "eager",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    dynamic: Mapping[str | int, Mapping[int, int]] | None = None,
    in_flight: int = 1,
) -> Plan | PendingPlan:
    """Plans a training step of `model` within a memory budget; nothing of it is executed.

    Args:
        model: what is trained; in training mode. It may be on the meta device with `hardware`.
        example_inputs: one batch: a tensor (the only positional argument of forward), a tuple
            (positional arguments) or a mapping (keywords). Left out, the model's
            `example_input_array`; without that the plan is *pending*: `apply()` gives a module that
            plans at its first training batch.
        example_kwargs: keyword arguments beside a tuple or tensor.
        budget_gb: gigabytes (1e9 bytes) that the whole step may hold at its peak, or "auto" (what
            the device has free, less a reserve of 8 %).
        optimizer: an optimizer or its class; its state counts, whether or not it exists yet.
        device: profile costs on this device; by default the parameters' device.
        hardware: price from a hardware profile ("a100-80gb", ..., or a TOML file) instead.
        solver: a name in `planner.SOLVERS`; "auto" combines them.
        time_limit: seconds for the solver.
        backend: what runs the rewritten graphs: "eager", the operators one by one, or "inductor",
            torch's compiler: forward and each slice of the backward pass are lowered at the first
            batch. Needs what `torch.compile` needs (on CPU a C++ compiler).
        keep: module-path patterns whose values are never made again.
        recompute: module-path patterns whose values are not held from forward to backward.
        dynamic: sizes that vary, with the largest they will have: `{"input_ids": {0: 32, 1: 512}}`
            for dimensions 0 and 1 of that argument (by name, or position). The plan is for the
            largest sizes and serves all smaller ones; without it, new sizes are planned when they
            come.
        in_flight: for a stage of a pipeline, how many micro-batches are between their forward and
            their backward at one time, this one included: for stage s of p stages (from 0) in a
            one-forward-one-backward schedule, p - s. Gradients count as existing.

    Returns:
        The plan, or a pending plan where there are no example inputs.

    Raises:
        InvalidBudget, UnknownHardware: an argument makes no sense.
        UntraceableModel: torch cannot trace the forward; names file and line.
        InfeasibleBudget: no schedule fits; says the least feasible budget.
        PlannerError: base of these, and of every other error that names an argument.
    """
    engine = _engine(
        model,
        budget_gb=budget_gb,
        optimizer=optimizer,
        device=device,
        hardware=hardware,
        solver=solver,
        time_limit=time_limit,
        backend=backend,
        keep=keep,
        recompute=recompute,
        dynamic=dynamic,
        in_flight=in_flight,
    )
    if not model.training:
        warnings.warn(
            "model is in eval mode: the plan is for steps in eval mode. Call model.train() first "
            "to plan for training",
            stacklevel=2,
        )
    inputs = inputs_of(model, example_inputs, example_kwargs)
    if inputs is None:
        return PendingPlan(engine)
    check_inputs(model, inputs)
    return engine.plan_for(inputs)


def pending(model: torch.nn.Module, **options: Unpack[_Options]) -> PendingPlan:
    """A plan for the first training batch, also if the model has an `example_input_array`."""
    return PendingPlan(_engine(model, **options))


def _engine(model: torch.nn.Module, **options: Unpack[_Options]) -> Engine:
    check_model(model)
    return Engine(model, checked(**options))
