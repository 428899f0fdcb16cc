"""The documentation builds without a warning, its links lead somewhere, its code runs.

Blocks marked `python` run in order, one page in one namespace and folder; with a title they are
written to that file instead. Lines of `console` blocks that begin with `$ checkpoint-planner` are
run. A comment `<!-- setup ... -->` holds what a page takes for granted.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from planner.commands.run import app
from tests.command_process import command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->"
    r'|```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)```',
    re.S,
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[re.Match[str]]:
    found = BLOCK.finditer(path.read_text())
    return [m for m in found if m["setup"] or m["kind"] in ("python", "console")]


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=name)
def test_code_in_pages_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "cache"))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(path):
        if block["title"]:
            (tmp_path / block["title"]).write_text(block["code"])
        elif block["kind"] == "console":
            for line in re.findall(r"^\$ checkpoint-planner (.*)$", block["code"], re.M):
                done = command(*shlex.split(line), cwd=tmp_path)
                assert done.code == 0, done.err
        else:
            code = textwrap.dedent(block["setup"] or block["code"])
            where = f"{name(path)}, block at character {block.start()}"
            exec(compile(code, where, "exec"), module.__dict__)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_between_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            assert re.fullmatch(r"https://[\w./#?=&%~+-]+", target), target
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), f"{name(path)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{name(path)} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]' to build the documentation")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = {p.relative_to(tmp_path).with_suffix(".md").as_posix() for p in tmp_path.rglob("*.html")}
    assert {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} <= made
    page = (tmp_path / "reference" / "python.html").read_text()
    for public in ("planner.plan", "planner.Plan.apply", "planner.fit", "InfeasibleBudget"):
        assert public in page
    for page_file in tmp_path.rglob("*.html"):
        for address in re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', page_file.read_text()
        ):
            assert not address.startswith("http"), f"{page_file.name} loads {address}"


def test_every_command_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    for made in app.registered_commands:
        assert made.name and re.search(rf"`{made.name}\b", text), made.name


def test_every_member_of_plan_files_is_in_the_reference() -> None:
    import json

    text = (ROOT / "docs" / "reference" / "plan-file.md").read_text()
    schema = json.loads((ROOT / "planner" / "plan.schema.json").read_text())
    assert [n for n in schema["properties"] if f"`{n}`" not in text] == []
