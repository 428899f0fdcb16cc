"""Which cost model prices a step, and what the step holds besides its values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from planner.backends import EAGER
from planner.progress import report
from planner.request import Inputs, Request, device_of, free_bytes, reserved_total
from runtime.execute import BOOKKEEPING_BYTES
from tracer.costs import CostModel
from tracer.errors import PlannerError
from tracer.extract import StepGraph
from tracer.fused import FusedCosts
from tracer.graph import ComputationGraph, Kind
from tracer.hardware import load_profile
from tracer.measured import MeasuredCosts
from tracer.residents import optimizer_step_bytes, resident_bytes
from tracer.roofline import RooflineCosts


@dataclass(frozen=True, eq=False)
class Pricing:
    """A cost model and the device it speaks for.

    Attributes:
        name: for people; costs: the model; memory_bytes: of a hardware profile's device, None where
            the device is at hand (then its free memory is asked for).
        device: where the model lies; runs_on: where its step will run.
    """

    name: str
    costs: CostModel
    device: torch.device
    memory_bytes: int | None
    runs_on: torch.device

    def progress(self, done: int, total: int) -> None:
        """Called while operations are priced, which on a device means measured."""
        report("pricing operations", done, total)

    @classmethod
    def of(cls, model: torch.nn.Module, request: Request) -> Pricing:
        """Measured costs on the device at hand, or a roofline from a hardware profile."""
        plain = cls._unfused(model, request)
        if request.backend == EAGER:
            return plain
        return dataclasses.replace(plain, costs=FusedCosts(plain.costs))

    @classmethod
    def _unfused(cls, model: torch.nn.Module, request: Request) -> Pricing:
        device = request.device or device_of(model)
        if request.hardware is not None:
            profile = load_profile(request.hardware)
            runs_on = torch.device(profile.device)
            return cls(profile.name, RooflineCosts(profile), device, profile.memory_bytes, runs_on)
        if device.type == "meta":
            raise PlannerError(
                "model is on the meta device, where nothing can be measured: pass hardware=, such "
                'as hardware="a100-80gb", to plan for a device described by numbers'
            )
        return cls(str(device), MeasuredCosts(device), device, None, device)

    def automatic_budget(self, fixed: int) -> int:
        """Bytes that budget_gb="auto" stands for."""
        if self.memory_bytes is not None:
            return reserved_total(self.memory_bytes)
        return free_bytes(self.device, fixed)

    def notes(self, step: StepGraph) -> tuple[str, ...]:
        """What the reader of a plan should know about its costs and assumptions."""
        notes = []
        estimated = sorted(set(self.costs.unmeasured) & {op.target for op in step.graph.operations})
        if estimated:
            notes.append(
                f"the cost of {len(estimated)} operators is only estimated: "
                + ", ".join(estimated[:5])
                + (", ..." if len(estimated) > 5 else "")
            )
        if step.absent:
            notes.append(
                f"{len(step.absent)} of {len(step.joint.tangents)} differentiable outputs are "
                "assumed to receive no gradient, since a scalar output is made from them"
            )
        return tuple(notes)


def resident(
    pricing: Pricing, model: torch.nn.Module, inputs: Inputs | tuple[Any, ...], optimizer: Any
) -> tuple[tuple[str, int], ...]:
    """Bytes held during the whole step, by owner."""
    batch = (inputs.args, dict(inputs.kwargs)) if isinstance(inputs, Inputs) else inputs
    held = resident_bytes(model, batch, optimizer, allocated=pricing.costs.allocated)
    return (*held, ("bookkeeping", BOOKKEEPING_BYTES))


def optimizer_peak(
    pricing: Pricing, model: torch.nn.Module, optimizer: Any, graph: ComputationGraph
) -> int:
    """Peak of the optimizer's step: everything held, all gradients, and its temporaries."""
    if optimizer is None:
        return 0
    step = optimizer_step_bytes(
        model, optimizer, pricing.runs_on, allocated=pricing.costs.allocated
    )
    return after_backward(graph) + step


def after_backward(graph: ComputationGraph) -> int:
    """Bytes held when the optimizer's step begins: the fixed part, all gradients, the outputs."""
    gradients = 0
    if not graph.accumulate:
        gradients = graph.bytes_of(Kind.GRADIENT)
    return graph.fixed + gradients + graph.bytes_of(Kind.OUTPUT)
