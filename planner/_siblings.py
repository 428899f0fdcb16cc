"""The check that `tracer` and `runtime` are ours.

The three packages have common names. Python takes the first `runtime` on its path, and a user's
own `runtime.py` beside their script is found before ours. Without this check the import fails
later, in the middle of our code, with a message about a name that is not there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SIBLINGS = ("tracer", "runtime")


def check_siblings() -> None:
    """Makes sure that the sibling packages come from the folder that `planner` comes from.

    Runs nothing of what it finds.

    Raises:
        ImportError: another module of that name is in the way (`path` says which file), or the
            sibling is missing.
    """
    home = Path(__file__).resolve().parent.parent
    for name in SIBLINGS:
        found = _file_of(name)
        if found is None:
            raise ImportError(
                f"planner needs its package {name!r} beside it in {home}; install "
                "checkpoint-planner again",
                name=name,
            )
        if Path(found).resolve() != home / name / "__init__.py":
            raise ImportError(
                f"{found} is in the way: planner needs its own package {name!r} from {home}, and "
                f"Python finds that file first. Rename it, or take its folder off sys.path",
                name=name,
                path=found,
            )


def _file_of(name: str) -> str | None:
    """The file that `import name` gives, without running it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin
