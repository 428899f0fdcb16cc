"""Writes a report: a page, a text, or plots, by the ending of the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.report_page import page
from planner.report_text import table
from tracer.errors import PlannerError

if TYPE_CHECKING:
    from planner.frontier import Frontier
    from planner.plan import Plan

PLOTS = (".png", ".svg", ".pdf")


def write_report(plan: Plan, path: Path, frontier: Frontier | None) -> None:
    """See `Plan.report`."""
    from planner.plan import write

    ending = path.suffix.lower()
    if ending in (".html", ".htm"):
        write(path, page(plan, frontier))
    elif ending in (".txt", ""):
        write(path, table(plan, rows=None) + "\n")
    elif ending in PLOTS:
        from planner.report_plot import save_plots

        save_plots(plan, path, frontier)
    else:
        raise PlannerError(
            f"{path} does not say which report: end the name in .html, .txt, {', '.join(PLOTS)}"
        )
