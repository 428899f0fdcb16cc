"""The HTML report: one file that needs nothing but a browser.

The page holds its style, its script and the plan as JSON. Whatever comes from a model or a file is
escaped: in the JSON so that it cannot end the script element, on the page because the script only
sets text. The page's own policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from planner.report_data import report_data
from planner.report_text import table

if TYPE_CHECKING:
    from planner.frontier import Frontier
    from planner.plan import Plan

_SCRIPTS = ("base.js", "charts.js", "tables.js", "trees.js", "main.js")
_HEIGHT = 640  # of the frame in a notebook, in CSS pixels


def page(plan: Plan, frontier: Frontier | None = None) -> str:
    """The report as HTML."""
    script = "\n" + "".join(_file(name) for name in _SCRIPTS)
    style = "\n" + _file("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    return Template(_file("page.html")).substitute(
        policy=policy,
        title=html.escape(f"Checkpoint plan for {plan.device}"),
        style=style,
        script=script,
        table=html.escape(table(plan)),
        data=_embedded(report_data(plan, frontier)),
    )


def notebook(plan: Plan) -> str:
    """The page in a frame, for a notebook's output."""
    return (
        f'<iframe sandbox="allow-scripts" title="Checkpoint plan" width="100%" height="{_HEIGHT}" '
        f'style="border: 1px solid #8888" srcdoc="{html.escape(page(plan))}"></iframe>'
    )


def _file(name: str) -> str:
    return (resources.files("planner") / "html" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _embedded(data: Any) -> str:
    """JSON that can stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
