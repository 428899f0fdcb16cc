"""What commands share: options, output for people or as JSON, bars, and the user's factories."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from planner.progress import listening
from tracer.errors import PlannerError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function without arguments that returns (model, example inputs).",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(help="A hardware profile such as a100-80gb, or a TOML file; else this machine."),
]
Optimizer = Annotated[
    str | None, typer.Option(help="A class in torch.optim whose state counts, such as AdamW.")
]
TimeLimit = Annotated[float, typer.Option(metavar="SECONDS", help="For the solver.")]
Patterns = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Module paths; may be given again.")
]


class CheckFailed(PlannerError):
    """A check that the person asked for did not pass."""


def show(text: object, data: Any, as_json: bool) -> None:
    """Prints for people, or as JSON."""
    print(json.dumps(data, indent=1) if as_json else text)


@contextmanager
def bars() -> Iterator[None]:
    """Progress on standard error while something long runs; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        tasks: dict[str, TaskID] = {}

        def listener(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for old in tasks.values():
                    p.update(old, visible=False)
                tasks[what] = p.add_task(what, total=total or None)
            p.update(tasks[what], completed=done, total=total or None)

        with listening(listener):
            yield


def imported(name: str) -> Any:
    """The object that MODULE:FUNCTION names."""
    module_name, _, function_name = name.partition(":")
    if not function_name or module_name.endswith(".py"):
        raise PlannerError(f"{name!r} is not MODULE:FUNCTION, such as train:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's files stand here
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise PlannerError(f"{name!r} cannot be imported: {error}") from error


def called(name: str, *arguments: Any) -> Any:
    """What the user's function returns."""
    function = imported(name)
    try:
        return function(*arguments)
    except PlannerError:
        raise
    except Exception as error:
        raise PlannerError(f"{name} raised {type(error).__name__}: {error}") from error


def model_and_inputs(factory: str) -> tuple[Any, Any]:
    """A model and a batch from the user's function."""
    made = called(factory)
    if not isinstance(made, tuple) or len(made) != 2:
        raise PlannerError(f"{factory} must return (model, example inputs)")
    if made[1] is None and getattr(made[0], "example_input_array", None) is None:
        raise PlannerError(f"{factory} returned no example inputs: return (model, batch)")
    return made


def optimizer_class(name: str | None) -> Any:
    """The class of torch.optim."""
    found = None if name is None else getattr(torch.optim, name, None)
    if name is not None and not (isinstance(found, type) and name != "Optimizer"):
        raise PlannerError(f"--optimizer {name} is no class in torch.optim, such as AdamW or SGD")
    return found


def budget(text: str) -> float | str:
    """Gigabytes, or "auto"."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise PlannerError(
            f'--budget-gb {text} is not a budget: pass gigabytes (1e9 bytes), or "auto"'
        ) from None
