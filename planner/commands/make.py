"""Commands that look at a model: plan, frontier, fit, apply-check."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from planner.api import plan as make_plan
from planner.backends import BACKENDS, EAGER
from planner.commands.output import (
    AsJson,
    CheckFailed,
    Factory,
    Hardware,
    Optimizer,
    Patterns,
    TimeLimit,
    bars,
    budget,
    called,
    imported,
    model_and_inputs,
    optimizer_class,
    show,
)
from planner.fit import OVER, fit
from planner.frontier import frontier
from planner.pending import PendingPlan
from planner.plan import Plan
from tracer.errors import PlannerError

Budget = Annotated[str, typer.Option(metavar="GB", help='Gigabytes (1e9 bytes), or "auto".')]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("plan")(_plan)
    app.command("frontier")(_frontier)
    app.command("fit")(_fit)
    app.command("apply-check")(_apply_check)


def _plan(
    factory: Factory,
    budget_gb: Budget,
    hardware: Hardware = None,
    optimizer: Optimizer = None,
    solver: Annotated[str, typer.Option(help="A name in planner.SOLVERS.")] = "auto",
    backend: Annotated[str, typer.Option(help=f"What runs it: {', '.join(BACKENDS)}.")] = EAGER,
    time_limit: TimeLimit = 60.0,
    keep: Patterns = None,
    recompute: Patterns = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Write the plan file.")] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a report: .html, .txt, .png, .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training step; nothing of it is run."""
    model, inputs = model_and_inputs(factory)
    with bars():
        made = make_plan(
            model,
            inputs,
            budget_gb=budget(budget_gb),
            hardware=hardware,
            optimizer=optimizer_class(optimizer),
            solver=solver,
            backend=backend,
            time_limit=time_limit,
            keep=keep or (),
            recompute=recompute or (),
        )
    if isinstance(made, PendingPlan):
        raise PlannerError(f"{factory} returned no example inputs: return (model, batch)")
    if save:
        made.save(save)
    if report:
        made.report(report)
    show(made, made.to_dict(), as_json)


def _frontier(
    factory: Factory,
    points: Annotated[int, typer.Option(help="How many budgets.")] = 12,
    hardware: Hardware = None,
    optimizer: Optimizer = None,
    time_limit: TimeLimit = 60.0,
    keep: Patterns = None,
    recompute: Patterns = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a report with the curve (needs --budget-gb)."),
    ] = None,
    budget_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="The plan that the report is about.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The trade-off curve: added time against peak memory, with lower bounds."""
    if report and budget_gb is None:
        raise PlannerError("--report needs --budget-gb: a report is about one plan on the curve")
    model, inputs = model_and_inputs(factory)
    with bars():
        found = frontier(
            model,
            inputs,
            points=points,
            hardware=hardware,
            optimizer=optimizer_class(optimizer),
            time_limit=time_limit,
            keep=keep or (),
            recompute=recompute or (),
        )
    if report and budget_gb is not None:
        found.plan(budget_gb).report(report, frontier=found)
    show(found, found.to_dict(), as_json)


def _fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:MODEL",
            help="A module, or a function that makes one (of the number of layers: --over layers).",
        ),
    ],
    inputs: Annotated[
        str, typer.Argument(metavar="MODULE:INPUTS", help="A function of the size: one batch.")
    ],
    budget_gb: Budget,
    over: Annotated[str, typer.Option(help=f"What grows: {', '.join(OVER)}.")] = "batch",
    points: Annotated[int, typer.Option(help="Sizes on the throughput curve.")] = 6,
    multiple: Annotated[int, typer.Option(help="Try only multiples of this.")] = 1,
    most: Annotated[int, typer.Option(help="The largest size to try.")] = 1 << 20,
    hardware: Hardware = None,
    optimizer: Optimizer = None,
    time_limit: TimeLimit = 60.0,
    keep: Patterns = None,
    recompute: Patterns = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan of the largest size.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The largest batch, sequence or number of layers that fits, and which is the fastest."""
    given: Any = imported(model)
    with bars():
        found = fit(
            given,
            lambda size: called(inputs, size),
            budget_gb=budget(budget_gb),
            over=over,
            points=points,
            multiple=multiple,
            most=most,
            hardware=hardware,
            optimizer=optimizer_class(optimizer),
            time_limit=time_limit,
            keep=keep or (),
            recompute=recompute or (),
        )
    if save:
        found.plan.save(save)
    show(found, found.to_dict(), as_json)


def _apply_check(
    file: str,
    factory: Factory,
    run: Annotated[
        bool, typer.Option(help="Also run one step with and without the plan, and compare.")
    ] = False,
    hardware: Hardware = None,
    optimizer: Optimizer = None,
    as_json: AsJson = False,
) -> None:
    """Check that a plan file fits a model on this machine; with --run, on a real step."""
    loaded = Plan.load(file)
    model, inputs = model_and_inputs(factory)
    with bars():
        found = loaded.check_against(
            model, inputs, hardware=hardware, optimizer=optimizer_class(optimizer)
        )
        data: dict[str, Any] = {"file": file, "fits": True, **found}
        lines = [
            f"{file} fits {factory}: the same graph, {found['operations']} operations.",
            f"With the costs of {hardware or 'this machine'} it peaks at "
            f"{found['peak_bytes'] / 1e9:.4f} GB, of a budget of "
            f"{loaded.budget_bytes / 1e9:.4f} GB.",
        ]
        if run:
            verified = Plan.load(file, model).verify(inputs)
            lines.append(str(verified))
            data |= {
                "bitwise": verified.bitwise,
                "within_budget": verified.within_budget,
                "measured_peak_bytes": verified.planned.peak_bytes,
            }
            if not verified.within_budget:
                raise CheckFailed(
                    f"{file} measured {verified.planned.peak_bytes / 1e9:.4f} GB, over its budget "
                    f"of {loaded.budget_bytes / 1e9:.4f} GB: plan again on this machine"
                )
    show("\n".join(lines), data, as_json)
