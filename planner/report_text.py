"""The table that `print(plan)` shows."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from planner.cuts import CutPoint
    from planner.plan import Plan

_WIDTH = 100


def table(plan: Plan, rows: int | None = 8) -> str:
    """The plan as text; at most `rows` rows of cut points (None: all of them)."""
    return rendered(_parts(plan, rows))


def rendered(parts: Iterable[RenderableType]) -> str:
    """Plain text of what rich would print, without spaces at the ends of lines."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
    console.print(Group(*parts))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _parts(plan: Plan, rows: int | None) -> Iterable[RenderableType]:
    yield Text(f"Checkpoint plan for {plan.device}, found by {plan.solver} in {_solved(plan)}")
    yield _figures(plan)
    yield Text(
        "Peak: " + ", ".join(f"{what} {gigabytes(n)}" for what, n in _largest(plan.breakdown))
    )
    if plan.recomputed:
        yield Text(
            f"{len(plan.recomputed)} operations run again "
            f"({sum(r.times for r in plan.recomputed)} calls, {milliseconds(plan.recompute_ns)}). "
            f"They start from {len(plan.cuts)} cut points: values kept from forward to backward. "
            "First those that avoid most, by bytes x time:"
        )
        yield _cuts(plan, rows)
    else:
        yield Text("Nothing is recomputed: with apply() the step fits as it is.")
    for note in plan.notes:
        yield Text(f"Note: {note}")


def _figures(plan: Plan) -> Table:
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures.add_column("")
    for name in ("this plan", "no recomputation", "least possible"):
        figures.add_column(name, justify="right")
    figures.add_row(
        f"peak, of a budget of {gigabytes(plan.budget_bytes)}",
        gigabytes(plan.peak_bytes),
        gigabytes(plan.baseline_peak_bytes),
        gigabytes(plan.minimum_peak_bytes, up=True),
    )
    figures.add_row(
        "saved from forward to backward",
        gigabytes(plan.saved_bytes),
        gigabytes(plan.baseline_saved_bytes),
        "",
    )
    base = plan.step_ns - plan.recompute_ns
    figures.add_row("step time", milliseconds(plan.step_ns), milliseconds(base), "")
    figures.add_row(
        "overhead", f"{plan.overhead:.2%}", "0.00%", f"{plan.lower_bound:.2%} at this budget"
    )
    return figures


def _cuts(plan: Plan, rows: int | None) -> Table:
    """Cut points that differ only in the number of their block stand in one row."""
    groups = grouped(plan.cuts)
    cuts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("kept: results of", "in module", "shape"):
        cuts.add_column(name, overflow="fold")
    for name in ("values", "MB together", "ms avoided"):
        cuts.add_column(name, justify="right")
    for module, group in groups[:rows]:
        first = group[0]
        cuts.add_row(
            Text(_short(first.op)),
            Text(module or "(outside of modules)"),
            "x".join(map(str, first.shape)),
            str(len(group)),
            f"{sum(c.bytes for c in group) / 1e6:.2f}",
            _avoided(group),
        )
    if rows is not None and len(groups) > rows:
        rest = [c for _, group in groups[rows:] for c in group]
        size = f"{sum(c.bytes for c in rest) / 1e6:.2f}"
        label = f"and {len(groups) - rows} more rows"
        cuts.add_row(label, "", "", str(len(rest)), size, _avoided(rest))
    return cuts


def _avoided(cuts: Sequence[CutPoint]) -> str:
    return f"{sum(c.recompute_ns for c in cuts) / 1e6:.2f}"


def _short(op: str) -> str:
    """An operator without its overload."""
    return op.removeprefix("aten.").removesuffix(".default")


def grouped(cuts: Sequence[CutPoint]) -> list[tuple[str, list[CutPoint]]]:
    """(module path, cut points of like operator and shape), the weightiest group first.

    A number in the path that differs between them becomes a range: "layer.[0-11].output".
    """
    groups: dict[tuple[object, ...], list[CutPoint]] = {}
    for cut in cuts:
        key = (re.sub(r"\d+", "#", cut.module), cut.op, cut.shape, cut.dtype)
        groups.setdefault(key, []).append(cut)
    found = [(_together([c.module for c in group]), group) for group in groups.values()]
    weight = {id(g): sum(c.bytes * c.recompute_ns for c in g) for _, g in found}
    return sorted(found, key=lambda pair: -weight[id(pair[1])])


def _together(paths: Sequence[str]) -> str:
    """One path for several that differ in their numbers only."""
    pieces = [re.split(r"(\d+)", path) for path in paths]
    columns = [sorted(set(column), key=_numbers_last) for column in zip(*pieces, strict=True)]
    return "".join(c[0] if len(c) == 1 else f"[{_ranges([int(n) for n in c])}]" for c in columns)


def _numbers_last(text: str) -> tuple[bool, int]:
    return text.isdigit(), int(text) if text.isdigit() else 0


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _solved(plan: Plan) -> str:
    proof = "proven optimal" if plan.status == "optimal" else f"within {plan.gap:.2%} of the bound"
    return f"{plan.solve_seconds:.1f} s ({proof})"


def _largest(breakdown: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    return sorted((item for item in breakdown if item[1]), key=lambda item: -item[1])


def gigabytes(nbytes: int, *, up: bool = False) -> str:
    """Bytes for people: GB (1e9) from 0.1 GB on, else MB; `up`: never less than they are."""
    unit, digits, name = (10**9, 3, "GB") if nbytes >= 1e8 else (10**6, 2, "MB")
    last = unit // 10**digits
    shown = -(-nbytes // last) * last if up else nbytes
    return f"{shown / unit:.{digits}f} {name}"


def milliseconds(time_ns: int) -> str:
    """Nanoseconds for people."""
    return f"{time_ns / 1e6:.1f} ms"
