"""Commands on plan files: show, diff, check, report, export, schema."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from planner.commands.output import AsJson, CheckFailed, Patterns, TimeLimit, bars, show
from planner.export import FORMATS
from planner.plan import Plan
from planner.plan_file import schema
from tracer.errors import PlannerError

DIFFERENT = 5

PlanFile = Annotated[str, typer.Argument(metavar="PLAN.JSON")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("show")(_show)
    app.command("diff")(_diff)
    app.command("check")(_check)
    app.command("edit")(_edit)
    app.command("report")(_report)
    app.command("export")(_export)
    app.command("schema")(_schema)


def _show(file: PlanFile, as_json: AsJson = False) -> None:
    """Print a plan file."""
    loaded = Plan.load(file)
    show(loaded, loaded.to_dict(), as_json)


def _diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE.JSON")],
    after: Annotated[str, typer.Argument(metavar="AFTER.JSON")],
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 5 if the plans differ.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """What changes between two plans: cut points, peak, time."""
    found = Plan.load(before).diff(Plan.load(after))
    show(found, found.to_dict(), as_json)
    return DIFFERENT if exit_code and not found.is_empty else 0


def _check(file: PlanFile, as_json: AsJson = False) -> None:
    """Derive the figures of a plan file again from its graph and schedule."""
    loaded = Plan.load(file)
    wrong = loaded.check()
    if wrong:
        raise CheckFailed(f"{file} does not hold: {'; '.join(wrong)}. Make the plan again")
    text = (
        f"{file} holds: its schedule runs its graph, peaks at {loaded.peak_bytes / 1e9:.4f} GB of "
        f"{loaded.budget_bytes / 1e9:.4f} GB, and takes {loaded.step_ns / 1e6:.1f} ms."
    )
    show(text, {"file": file, "holds": True, "peak_bytes": loaded.peak_bytes}, as_json)


def _edit(
    file: PlanFile,
    save: Annotated[str, typer.Option(metavar="FILE", help="Where the new plan goes.")],
    keep: Patterns = None,
    recompute: Patterns = None,
    budget_gb: Annotated[float | None, typer.Option(metavar="GB", help="Another budget.")] = None,
    time_limit: TimeLimit = 60.0,
    as_json: AsJson = False,
) -> None:
    """Plan the same step with other wishes; prints what that changes."""
    loaded = Plan.load(file)
    with bars():
        made = loaded.edit(
            keep=keep, recompute=recompute, budget_gb=budget_gb, time_limit=time_limit
        )
    made.save(save)
    found = loaded.diff(made)
    show(found, found.to_dict(), as_json)


def _report(
    file: PlanFile,
    to: Annotated[str, typer.Argument(metavar="REPORT", help=".html, .txt, .png, .svg or .pdf")],
    as_json: AsJson = False,
) -> None:
    """Write a report of a plan file."""
    Plan.load(file).report(to)
    show(f"wrote {to}", {"wrote": to}, as_json)


def _export(
    file: PlanFile,
    to: Annotated[str, typer.Argument(metavar="FILE", help=".json, .csv, .graphml or .dot")],
    form: Annotated[str | None, typer.Option("--format", help=", ".join(FORMATS))] = None,
    as_json: AsJson = False,
) -> None:
    """Write timeline (Chrome trace, CSV) or graph (GraphML, DOT) of a plan file."""
    if to == file:
        raise PlannerError(f"{to} is the plan file itself: write to another name")
    Plan.load(file).export(to, form)
    show(f"wrote {to}", {"wrote": to}, as_json)


def _schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of plan files."""
    show(schema().rstrip(), json.loads(schema()), as_json)
