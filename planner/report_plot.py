"""The report as plots, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.export import without_control
from planner.parts import baseline_timeline
from planner.report_data import curve, thinned
from tracer.errors import PlannerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.frontier import Frontier
    from planner.plan import Plan

_MODULES = 12


def save_plots(plan: Plan, path: Path, frontier: Frontier | None = None) -> None:
    """Writes the plots; the ending of the name is the format."""
    made = figure(plan, frontier)
    try:
        made.savefig(path)
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error}") from error


def figure(plan: Plan, frontier: Frontier | None = None) -> Figure:
    """Memory over the step, trade-off curve, and the modules that keep and recompute most.

    Raises:
        PlannerError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlannerError(
            "plots need matplotlib: pip install 'checkpoint-planner[plot]', or write the report as "
            ".html or .txt"
        ) from error
    made = Figure(figsize=(10, 12), layout="constrained")
    over_time, trade, modules = made.subplots(3, 1)
    _memory(over_time, plan)
    _curve(trade, plan, frontier)
    _modules(modules, plan)
    return made


def _memory(axes: Axes, plan: Plan) -> None:
    for entries, style, label in (
        (baseline_timeline(plan), "--", "no recomputation"),
        (plan.timeline, "-", "this plan"),
    ):
        points = thinned(entries)
        axes.plot(
            [start / 1e6 for start, _ in points],
            [entry.bytes / 1e9 for _, entry in points],
            style,
            drawstyle="steps-post",
            label=label,
        )
    axes.axhline(plan.budget_bytes / 1e9, linestyle=":", color="black", label="budget")
    axes.set(xlabel="ms of the cost model", ylabel="GB held", title="Memory over the step", ylim=0)
    axes.legend()


def _curve(axes: Axes, plan: Plan, frontier: Frontier | None) -> None:
    data = curve(plan, frontier)
    for name, style, label in (("bounds", "-.", "at least"), ("points", "-", "plans")):
        xs = [budget / 1e9 for budget, _ in data[name]]
        axes.plot(xs, [100 * share for _, share in data[name]], style, label=label)
    axes.plot([plan.peak_bytes / 1e9], [100 * plan.overhead], "o", label="this plan")
    axes.set(xlabel="GB at the peak", ylabel="added step time, %", title="Trade-off")
    axes.legend()


def _modules(axes: Axes, plan: Plan) -> None:
    """The modules whose operations run again longest, and what they keep of their results."""
    again: dict[str, int] = {}
    for r in plan.recomputed:
        again[r.module] = again.get(r.module, 0) + r.time_ns
    names = sorted(again, key=lambda name: -again[name])[:_MODULES][::-1]
    bars: Any = axes.barh([_plain(name) for name in names], [again[n] / 1e6 for n in names])
    axes.bar_label(bars, fmt="%.1f")
    axes.set(xlabel="ms recomputed", title="Modules with most recomputation")


def _plain(name: str) -> str:
    """Matplotlib would read a formula between dollar signs, and write what no SVG may hold."""
    return without_control(name or "(outside of modules)").replace("$", r"\$")
