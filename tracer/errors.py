"""Errors that people see. All are subclasses of `PlannerError`, so one `except` catches them."""

from __future__ import annotations


class PlannerError(Exception):
    """Base of every error that this library raises on purpose."""


class UntraceableModel(PlannerError):
    """torch cannot trace the model's forward as one graph.

    The message names the place (file:line) where tracing stopped and torch's own reason.
    """


class InvalidBudget(PlannerError, ValueError):
    """The budget is not a positive, finite number of gigabytes (or "auto")."""


class UnknownHardware(PlannerError, ValueError):
    """No hardware profile of that name, or the device is not on this machine."""


class StalePlan(PlannerError):
    """The plan was made for another graph: other model, shapes, dtypes or torch version."""


class InfeasibleBudget(PlannerError):
    """No schedule that the planner knows fits the budget.

    Attributes:
        budget_bytes: the budget that was asked for.
        minimum_bytes: the least budget that is known to work; planning with it succeeds.
        limiting: what fills the least peak, largest first: pairs of (description, bytes).
    """

    def __init__(
        self, budget_bytes: int, minimum_bytes: int, limiting: tuple[tuple[str, int], ...] = ()
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.limiting = limiting
        # 1e-9 GB is one byte: nine decimals, so that the number in the message can be pasted back.
        lines = [
            f"budget_gb={budget_bytes / 1e9:.9g} is below the least feasible budget of "
            f"{minimum_bytes / 1e9:.9f} GB; pass at least budget_gb={minimum_bytes / 1e9:.9f}"
        ]
        if limiting:
            lines.append("At the least peak the memory holds:")
            lines += [f"  {nbytes / 1e9:.3f} GB  {what}" for what, nbytes in limiting]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.budget_bytes, self.minimum_bytes, self.limiting)
