"""Puts the pages in reading order; pages that are not named here follow by name."""

from __future__ import annotations

from typing import Any

FIRST = (
    "index.md",
    "tutorial.md",
    "how-to/",
    "supported.md",
    "reference/",
    "comparison.md",
    "costs.md",
)
LAST = ("architecture.md", "runtime.md", "measuring.md")


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with all files, before it makes the navigation."""
    return type(files)(sorted(files, key=_place))


def _place(file: Any) -> tuple[int, bool, str]:
    name = str(file.src_uri)
    place = len(FIRST)
    for position, start in enumerate(FIRST):
        if name.startswith(start):
            place = position
    if name in LAST:
        place = len(FIRST) + 1 + LAST.index(name)
    return place, not name.endswith("index.md"), name
