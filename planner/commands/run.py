"""Runs a command: exit codes, and errors in one line.

Exit codes: 0 done; 1 an error; 2 the command line itself is wrong; 3 no plan fits the budget; 4 a
check failed (a plan file, or a plan and a model, do not hold together); 5 `diff --exit-code` found
a difference; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer
import typer.main

from planner.commands import costs, doctor, files, make
from planner.commands.output import CheckFailed
from tracer.errors import InfeasibleBudget, PlannerError, StalePlan

app = typer.Typer(
    name="checkpoint-planner",
    help="Plan which activations a PyTorch training step keeps and which it recomputes.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 error, 2 wrong command line, 3 the budget is too small, "
    "4 a check failed, 5 plans differ (diff --exit-code). With --debug, errors show a traceback.",
)
for module in (make, files, costs, doctor):
    module.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, as_json = "--debug" in given, "--json" in given
    given = [word for word in given if word != "--debug"]
    warnings.simplefilter("default" if debug else "ignore")
    try:
        code = _run(given)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, message = _explained(error)
        _complain(message, type(error).__name__, code, as_json)
    return code


def _run(given: list[str]) -> int:
    command = typer.main.get_command(app)
    result: Any = command.main(given, prog_name="checkpoint-planner", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _explained(error: Exception) -> tuple[int, str]:
    """Exit code and one line for an error."""
    match error:
        case InfeasibleBudget():
            return 3, str(error).splitlines()[0]
        case StalePlan() | CheckFailed():
            return 4, str(error)
        case PlannerError():
            return 1, str(error)
    if type(error).__module__.partition(".")[0] in ("click", "typer"):
        message = getattr(error, "format_message", lambda: str(error))()
        context = getattr(error, "ctx", None)
        if type(error).__name__ in ("Abort", "Exit"):
            return getattr(error, "exit_code", 130), ""
        path = context.command_path if context else "checkpoint-planner"
        return 2, f"{message} See {path} --help"
    return 1, f"{type(error).__name__}: {error} (--debug shows where)"


def _complain(message: str, kind: str, code: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    if message:
        print(f"checkpoint-planner: {' '.join(message.split())}", file=sys.stderr)
