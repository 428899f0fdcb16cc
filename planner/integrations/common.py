"""What the callbacks for the trainers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner.api import pending
from planner.pending import PendingPlan
from planner.plan import Plan
from tracer.errors import PlannerError


class Planning:
    """A pending plan while a trainer trains.

    Args:
        options: of `planner.plan`, `budget_gb` among them; not `example_inputs`: the first batch of
            the training is what the plan is made for.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        given = {"example_inputs", "example_kwargs"} & options.keys()
        if given:
            raise PlannerError(
                f"{', '.join(sorted(given))}= cannot be given here: the plan is made for the first "
                "batch of the training. Call planner.plan(...) yourself to plan for another one"
            )
        if "budget_gb" not in options:
            raise PlannerError('budget_gb= is missing: gigabytes (1e9 bytes), or "auto"')
        self._options = options
        self._pending: PendingPlan | None = None

    def start(
        self, model: torch.nn.Module, optimizer: Any, log: Callable[[Plan], None]
    ) -> torch.nn.Module | None:
        """Makes the model plan at its first batch; None if a plan is applied to it already.

        `log` is called with each plan when it is made: the first, and those for other shapes.
        """
        if isinstance(getattr(model, "plan", None), Plan | PendingPlan):
            return None
        options = {"optimizer": bare_optimizer(optimizer), **self._options}
        self._pending = pending(model, **options)
        self._pending.on_plan(log)
        return self._pending.apply()

    def stop(self) -> None:
        """Makes the model run as before."""
        if self._pending is not None:
            self._pending.remove()
        self._pending = None


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of a trainer's wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def figures(made: Plan) -> dict[str, float]:
    """The plan in numbers, for loggers and trackers."""
    return {
        "plan/budget_gb": made.budget_bytes / 1e9,
        "plan/peak_gb": made.peak_bytes / 1e9,
        "plan/peak_without_gb": made.baseline_peak_bytes / 1e9,
        "plan/overhead": made.overhead,
        "plan/recomputed_operations": float(len(made.recomputed)),
    }
