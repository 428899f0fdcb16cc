"""The table that `print(plan)` shows."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from planner.plan import Plan

_WIDTH = 100


def table(plan: Plan, rows: int | None = 8) -> str:
    """The plan as text; at most `rows` cut points (None: all of them)."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
    console.print(Group(*_parts(plan, rows)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _parts(plan: Plan, rows: int | None) -> Iterable[RenderableType]:
    yield Text(f"Checkpoint plan for {plan.device}, found by {plan.solver} in {_solved(plan)}")
    yield _figures(plan)
    yield Text("Peak: " + ", ".join(f"{what} {_gb(n)}" for what, n in _largest(plan.breakdown)))
    if plan.recomputed:
        yield Text(
            f"{len(plan.recomputed)} operations run again "
            f"({sum(r.times for r in plan.recomputed)} calls, {plan.recompute_ns / 1e6:.1f} ms), "
            f"from {len(plan.cuts)} cut points:"
        )
        yield _cuts(plan, rows)
    else:
        yield Text("Nothing is recomputed: the step fits as it is.")
    for note in plan.notes:
        yield Text(f"Note: {note}")


def _figures(plan: Plan) -> Table:
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures.add_column("")
    for name in ("this plan", "no recomputation", "least possible"):
        figures.add_column(name, justify="right")
    figures.add_row(
        f"peak, of a budget of {_gb(plan.budget_bytes)}",
        _gb(plan.peak_bytes),
        _gb(plan.baseline_peak_bytes),
        _gb(plan.minimum_peak_bytes),
    )
    figures.add_row(
        "saved from forward to backward", _gb(plan.saved_bytes), _gb(plan.baseline_saved_bytes), ""
    )
    base = plan.step_ns - plan.recompute_ns
    figures.add_row("step time", _ms(plan.step_ns), _ms(base), "")
    figures.add_row(
        "overhead", f"{plan.overhead:.2%}", "0.00%", f"{plan.lower_bound:.2%} at this budget"
    )
    return figures


def _cuts(plan: Plan, rows: int | None) -> Table:
    cuts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("cut point", "module", "shape"):
        cuts.add_column(name, overflow="fold")
    cuts.add_column("MB", justify="right")
    cuts.add_column("reason", overflow="fold")
    for cut in plan.cuts[:rows]:
        cuts.add_row(
            Text(cut.name),
            Text(cut.module),
            "x".join(map(str, cut.shape)),
            f"{cut.bytes / 1e6:.2f}",
            Text(cut.reason),
        )
    if rows is not None and len(plan.cuts) > rows:
        cuts.add_row(f"and {len(plan.cuts) - rows} more")
    return cuts


def _solved(plan: Plan) -> str:
    proof = "proven optimal" if plan.status == "optimal" else f"within {plan.gap:.2%} of the bound"
    return f"{plan.solve_seconds:.1f} s ({proof})"


def _largest(breakdown: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    return sorted((item for item in breakdown if item[1]), key=lambda item: -item[1])


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.1f} ms"
