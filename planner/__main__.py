"""Command line: `python -m planner`, or `checkpoint-planner`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.api import plan
from planner.pending import PendingPlan
from planner.plan import Plan
from tracer import cost_cache
from tracer.errors import PlannerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if it did its work, 1 for an error that it explains in one line."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except PlannerError as error:
        print(f"checkpoint-planner: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkpoint-planner", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    make = commands.add_parser("plan", help="plan a training step")
    make.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, example inputs)",
    )
    make.add_argument("--budget-gb", required=True, type=_budget, help='gigabytes, or "auto"')
    make.add_argument("--hardware", help="a hardware profile instead of the device at hand")
    make.add_argument("--solver", default="auto")
    make.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    make.add_argument("--save", metavar="FILE", help="write the plan to a file")
    make.add_argument("--json", action="store_true", help="print the plan as JSON")
    make.set_defaults(run=_plan)

    show = commands.add_parser("show", help="print a plan file")
    show.add_argument("file")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=lambda args: _print(Plan.load(args.file), args.json))

    costs = commands.add_parser("costs", help="the cache of measured costs")
    costs.add_argument("action", choices=("show", "clear", "export", "import"))
    costs.add_argument("file", nargs="?", help="for export and import")
    costs.set_defaults(run=_costs)
    return parser


def _budget(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _plan(args: argparse.Namespace) -> None:
    model, inputs = _made_by(args.factory)
    made = plan(
        model,
        inputs,
        budget_gb=args.budget_gb,
        hardware=args.hardware,
        solver=args.solver,
        time_limit=args.time_limit,
    )
    if isinstance(made, PendingPlan):
        raise PlannerError(f"{args.factory} returned no example inputs: return (model, batch)")
    if args.save:
        made.save(args.save)
    _print(made, args.json)


def _made_by(factory: str) -> tuple[Any, Any]:
    """What the user's function returns."""
    module_name, _, function_name = factory.partition(":")
    if not function_name:
        raise PlannerError(f"{factory!r} is not MODULE:FUNCTION, such as train:build")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's files stand here
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise PlannerError(f"{factory!r} cannot be imported: {error}") from error
    made = function()
    if not isinstance(made, tuple) or len(made) != 2:
        raise PlannerError(f"{factory} must return (model, example inputs)")
    return made


def _print(made: Plan, as_json: bool) -> None:
    print(json.dumps(made.to_dict(), indent=1) if as_json else made)


def _costs(args: argparse.Namespace) -> None:
    if args.action in ("export", "import") and not args.file:
        raise PlannerError(f"costs {args.action} needs a file")
    try:
        match args.action:
            case "show":
                files = cost_cache.show()
                print("\n".join(map(str, files)) or f"no costs in {cost_cache.cache_folder()}")
            case "clear":
                print(f"removed {cost_cache.clear()} files")
            case "export":
                print(f"exported {cost_cache.export_costs(Path(args.file))} costs")
            case _:
                print(f"imported {cost_cache.import_costs(Path(args.file))} costs")
    except (cost_cache.CacheError, OSError) as error:
        raise PlannerError(f"costs {args.action}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
