"""The answer of `planner.fit`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.report_text import gigabytes, milliseconds, rendered

if TYPE_CHECKING:
    from planner.plan import Plan


@dataclass(frozen=True)
class FitPoint:
    """A size, and what the step costs there within the budget.

    Attributes:
        size: batch, sequence length or number of layers.
        step_ns: predicted time of the step; peak_bytes: its peak.
        overhead: added step time over the same step without recomputation, as a fraction.
        lower_bound: no plan at this size has less.
        per_second: sizes per second (samples for a batch, positions of one sequence for a
            sequence); for layers it says little.
        traced: whether the step was traced at this size, or derived from others.
    """

    size: int
    step_ns: int
    peak_bytes: int
    overhead: float
    lower_bound: float
    per_second: float
    traced: bool


@dataclass(frozen=True)
class Fit:
    """What fits a budget.

    Attributes:
        over: "batch", "sequence" or "layers".
        largest: the largest size that fits; largest_plain: without recomputation, 0 if none does.
        plan: for the largest size, ready for `apply()`.
        curve: figures at several sizes, the smallest first.
        traced: sizes that were traced; device: whose costs these are; seconds: all of it took.
    """

    over: str
    budget_bytes: int
    largest: int
    largest_plain: int
    plan: Plan
    curve: tuple[FitPoint, ...]
    traced: tuple[int, ...]
    device: str
    seconds: float

    @property
    def best(self) -> FitPoint:
        """The point of the curve with the most samples per second."""
        return max(self.curve, key=lambda p: (p.per_second, p.size))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; the plan is left out, save it with `fit.plan.save(path)`."""
        names = [n for n in self.__dataclass_fields__ if n not in ("plan", "curve")]
        data = {name: getattr(self, name) for name in names}
        data["traced"] = list(self.traced)
        return {**data, "best": self.best.size, "curve": [asdict(p) for p in self.curve]}

    def __str__(self) -> str:
        return rendered(self._parts())

    def _parts(self) -> Iterable[RenderableType]:
        yield Text(
            f"Within {gigabytes(self.budget_bytes)} on {self.device}: {self.over} {self.largest} "
            f"with recomputation, {self.largest_plain or 'none'} without. "
            f"Traced at {', '.join(map(str, self.traced))}; {self.seconds:.0f} s."
        )
        yield Text(f"The most per second: {self.over} {self.best.size}.")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in (self.over, "peak", "step time", "added time", "at least", "per second", ""):
            table.add_column(name, justify="right")
        for p in self.curve:
            table.add_row(
                str(p.size),
                gigabytes(p.peak_bytes),
                milliseconds(p.step_ns),
                f"{p.overhead:.2%}",
                f"{p.lower_bound:.2%}",
                f"{p.per_second:.4g}",
                "fastest" if p is self.best else "",
            )
        yield table
