"""Runs a real step with and without the plan, and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from planner.parting import Parting, first_parting, tolerance_for, zero_gradients
from planner.pricing import resident
from planner.request import Inputs, inputs_of
from planner.state import ModelState
from runtime.measure import Measurement, measure
from runtime.torch_private import tree_leaves
from tracer.errors import PlannerError

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.plan import Plan


@dataclass(frozen=True)
class Verification:
    """What one step gave with the plan and without it.

    Attributes:
        worst: for outputs, gradients and buffers the largest absolute difference and where; 0.0
            means bitwise equal.
        planned, plain: what was measured. The optimizer's state counts in their peaks.
        predicted_bytes: predicted peak of forward and backward; budget_bytes: of the plan.
        optimizer_bytes: predicted peak of the optimizer's step, where it is higher; it is not run.
        parting: the first operation at which other bytes were held than predicted, if any.
    """

    worst: Mapping[str, tuple[float, str]]
    planned: Measurement
    plain: Measurement
    predicted_bytes: int
    budget_bytes: int
    optimizer_bytes: int = 0
    parting: Parting | None = None

    @property
    def bitwise(self) -> bool:
        """Whether outputs, gradients and buffers are equal to the last bit."""
        return all(difference == 0.0 for difference, _ in self.worst.values())

    @property
    def within_budget(self) -> bool:
        return self.planned.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        lines = []
        for what, (difference, where) in self.worst.items():
            equal = difference == 0.0
            text = "bitwise equal" if equal else f"differ by {difference:.3g} at {where}"
            lines.append(f"{what}: {text}")
        lines.append(
            f"peak: predicted {self.predicted_bytes / 1e9:.4f} GB, measured "
            f"{self.planned.peak_bytes / 1e9:.4f} GB, budget {self.budget_bytes / 1e9:.4f} GB, "
            f"without the plan {self.plain.peak_bytes / 1e9:.4f} GB"
            f"{'' if self.within_budget else '; OVER THE BUDGET'}"
        )
        if self.optimizer_bytes:
            lines.append(
                f"the optimizer's step, which was not run, is predicted to hold "
                f"{self.optimizer_bytes / 1e9:.4f} GB"
            )
        held = "as predicted at every operation" if self.parting is None else str(self.parting)
        lines.append(f"bytes held: {held}")
        lines.append(
            f"time: {self.planned.seconds:.3f} s with the plan, {self.plain.seconds:.3f} s without "
            "(one call each, under the profiler)"
        )
        return "\n".join(lines)


def verify(engine: Engine, plan: Plan, batch: Any) -> Verification:
    """Compares a planned with a plain step; parameters, buffers and gradients are put back."""
    model = engine.model
    inputs = inputs_of(model, batch, None)
    if inputs is None:
        raise PlannerError("batch= is needed: pass a batch as example_inputs of plan takes it")
    trial = _Trial(engine, plan, inputs)
    held = _optimizer_state(engine, plan)
    before = engine.plan
    try:
        planned, one = trial.run(engine.activate(plan))
        ran = engine.plan or plan  # made again, if the batch is not what the plan is for
        predicted = max((entry.bytes for entry in ran.timeline), default=ran.peak_bytes)
        # A plan from a file knows no optimizer: its graph here does not count the state.
        counted = held if engine.request.optimizer is not None else 0
        parting = trial.parting(counted, tolerance_for(predicted))
        plain, other = trial.run(engine.plain())
    finally:
        trial.state.restore(gradients=True)
        if before is not None:
            engine.activate(before)
    return Verification(
        {what: _worst(one[what], other[what]) for what in one},
        _with(planned, held),
        _with(plain, held),
        predicted,
        plan.budget_bytes,
        ran.peak_bytes if ran.peak_bytes > predicted else 0,
        parting,
    )


def _optimizer_state(engine: Engine, plan: Plan) -> int:
    """Bytes of the optimizer's state, which forward and backward hold and do not touch.

    What exists is counted, what does not yet is as predicted.
    """
    name, optimizer = "optimizer state", engine.request.optimizer
    if optimizer is None:
        return dict(plan.breakdown).get(name, 0)
    return dict(resident(engine.pricing, engine.model, (), optimizer)).get(name, 0)


def _with(measurement: Measurement, more: int) -> Measurement:
    return dataclasses.replace(measurement, peak_bytes=measurement.peak_bytes + more)


class _Trial:
    """Runs steps of one batch on a model that is put back after each."""

    def __init__(self, engine: Engine, plan: Plan, inputs: Inputs) -> None:
        self.engine, self.plan, self.inputs = engine, plan, inputs
        self.state = ModelState(engine.model, inputs.tensors())

    def run(
        self, call: Callable[..., Any]
    ) -> tuple[Measurement, dict[str, dict[str, torch.Tensor]]]:
        """Measures a step, and what it gave."""
        self._start()
        call_inputs(call, self.inputs)  # once unmeasured: rewriting and first touches
        self._start()
        return _step(self.engine.model, call, self.inputs)

    def parting(self, others: int, tolerance: int) -> Parting | None:
        """Where the bytes of the plan in force are other than predicted."""
        self._start()
        kept: list[Any] = []
        batch = (self.inputs.args, dict(self.inputs.kwargs))
        return first_parting(
            self.engine,
            lambda: kept.append(call_inputs(self.engine.train_call, self.inputs)),
            batch,
            others=others,
            tolerance=tolerance,
        )

    def _start(self) -> None:
        self.state.restore()
        if self.plan.accumulate:
            zero_gradients(self.engine.model, self.state.gradients)


def call_inputs(call: Callable[..., Any], inputs: Inputs) -> Any:
    """Forward and backward of one batch; the outputs."""
    outputs = call(*inputs.args, **inputs.kwargs)
    loss_of(outputs).backward()
    return outputs


def loss_of(outputs: Any) -> torch.Tensor:
    """The scalar that the model returns; else the mean of squares of what it returns.

    Half precision is cast up first, and one kernel makes the rest, as with losses under autocast.
    """
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    scalars = [t for t in tensors if t.dim() == 0]
    if scalars:
        return scalars[0]
    return torch.stack([_mean_square(t) for t in tensors]).sum()


def _mean_square(tensor: torch.Tensor) -> torch.Tensor:
    real = tensor.abs() if tensor.is_complex() else tensor
    if real.dtype.itemsize >= torch.float32.itemsize:
        return real.square().mean()
    zeros = torch.zeros((), device=real.device).expand(real.shape)
    return torch.nn.functional.mse_loss(real.float(), zeros)


def _step(
    model: torch.nn.Module, call: Callable[..., Any], inputs: Inputs
) -> tuple[Measurement, dict[str, dict[str, torch.Tensor]]]:
    kept: dict[str, Any] = {}

    def step() -> None:
        kept["outputs"] = call_inputs(call, inputs)

    batch = (inputs.args, dict(inputs.kwargs))
    measurement = measure(step, model=model, inputs=batch)
    leaves = tree_leaves(kept["outputs"])
    return measurement, {
        "outputs": {
            str(i): t.detach().clone() for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)
        },
        "gradients": {
            n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None
        },
        "buffers": {n: b.detach().clone() for n, b in model.named_buffers()},
    }


def _worst(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    if one.keys() != other.keys():
        return float("inf"), ", ".join(sorted(one.keys() ^ other.keys()))
    worst, where = 0.0, ""
    for name, tensor in one.items():
        if torch.equal(tensor, other[name]):
            continue
        difference = float((tensor.double() - other[name].double()).abs().max())
        if not difference <= worst:
            worst, where = difference, name
    return worst, where
