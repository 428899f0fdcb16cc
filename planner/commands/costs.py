"""The command on the cache of measured costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands.output import AsJson, show
from tracer import cost_cache
from tracer.errors import PlannerError


class Action(StrEnum):
    """What to do with the cache."""

    SHOW = "show"
    CLEAR = "clear"
    EXPORT = "export"
    IMPORT = "import"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("costs")(_costs)


def _costs(
    action: Action,
    file: Annotated[str | None, typer.Argument(help="For export and import.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show, clear, export or import the costs measured on this machine."""
    if action in (Action.EXPORT, Action.IMPORT) and not file:
        raise PlannerError(f"costs {action} needs a file")
    try:
        text, data = _done(action, Path(file or ""))
    except (cost_cache.CacheError, OSError) as error:
        raise PlannerError(f"costs {action}: {error}") from error
    show(text, {"action": str(action), **data}, as_json)


def _done(action: Action, file: Path) -> tuple[str, dict[str, Any]]:
    match action:
        case Action.SHOW:
            files = cost_cache.show()
            folder = cost_cache.cache_folder()
            text = "\n".join(map(str, files)) or f"no costs in {folder}"
            return text, {"folder": str(folder), "files": [_plain(f) for f in files]}
        case Action.CLEAR:
            count = cost_cache.clear()
            return f"removed {count} files", {"files": count}
        case Action.EXPORT:
            count = cost_cache.export_costs(file)
            return f"exported {count} costs", {"costs": count}
        case _:
            count = cost_cache.import_costs(file)
            return f"imported {count} costs", {"costs": count}


def _plain(file: cost_cache.CacheFile) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "environment": dict(file.environment),
        "entries": file.entries,
    }
