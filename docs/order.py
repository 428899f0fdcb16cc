"""Puts the pages in reading order; pages that are not named here follow by name."""

from __future__ import annotations

from typing import Any

from mkdocs.utils import nest_paths

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
    """Called by mkdocs with all files; its own navigation would be sorted by name."""
    pages = [file.src_uri for file in files if file.is_documentation_page()]
    config["nav"] = nest_paths(sorted(pages, key=_place))
    return files


def _place(name: str) -> tuple[int, bool, str]:
    place = len(FIRST)
    for position, start in enumerate(FIRST):
        if name.startswith(start):
            place = position
    if name in LAST:
        place = len(FIRST) + 1 + LAST.index(name)
    return place, not name.endswith("index.md"), name
