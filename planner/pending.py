"""A plan that waits for its first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.plan import Plan


class PendingPlan:
    """What `plan` returns without example inputs.

    `apply()` returns the model, which makes its plan at the first training batch; `model.plan`
    shows it from then on, and shows this object before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __str__(self) -> str:
        budget = self._engine.request.budget_bytes
        size = "what the device has free" if budget is None else f"{budget / 1e9:.3f} GB"
        return f"Pending checkpoint plan (budget {size}): it is made at the first training batch."

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a pending plan belongs to its model and cannot be pickled")

    def __deepcopy__(self, memo: dict[int, object]) -> PendingPlan:
        return self

    def on_plan(self, tell: Callable[[Plan], None]) -> None:
        """Calls `tell` with each plan that is made while this one is applied."""
        self._engine.listeners.append(tell)

    def apply(self) -> torch.nn.Module:
        """Makes the model plan at its first training batch; returns the same object."""
        return self._engine.install_pending(self)

    def remove(self) -> torch.nn.Module:
        """Undoes `apply`."""
        return self._engine.uninstall()
