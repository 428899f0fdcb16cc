"""What may import what, where private torch names may stand, and shadowed packages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tracer", "runtime", "planner")
MAY_IMPORT = {
    "tracer": {"tracer"},
    "runtime": {"tracer", "runtime"},
    "planner": {"tracer", "runtime", "planner"},
}
OURS = {*PACKAGES, "examples", "benchmarks", "tests"}
PRIVATE_HOMES = {"tracer/torch_private.py", "runtime/torch_private.py"}
PRIVATE_NAME = re.compile(r"^torch(\.\w+)*\._(?!_)")


def _sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=_relative)
def test_import_direction(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    imported = {name.split(".")[0] for name in _imported(ast.parse(path.read_text()))}
    assert imported & OURS <= MAY_IMPORT[package]


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes of a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What a file's own names stand for: `from torch import fx as f` makes f -> torch.fx."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def private_torch_names(source: str) -> set[str]:
    """Private names below torch that a file imports, reaches or asks for by a string."""
    tree = ast.parse(source)
    aliases = _aliases(tree)

    def full(node: ast.AST) -> str:
        head, _, rest = _dotted(node).partition(".")
        return ".".join(filter(None, (aliases.get(head, head), rest)))

    names = set(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(full(node))
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "hasattr", "setattr"):
            match node.args:
                case [owner, ast.Constant(value=str(attribute)), *_]:
                    names.add(f"{full(owner)}.{attribute}")
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith("import_module"):
            names.update(str(a.value) for a in node.args if isinstance(a, ast.Constant))
    return {name for name in names if PRIVATE_NAME.match(name)}


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in _sources("planner", "runtime", "tracer", "examples", "benchmarks", "tests")
        if _relative(path) not in PRIVATE_HOMES
    ],
    ids=_relative,
)
def test_private_torch_names_have_two_homes(path: Path) -> None:
    assert not private_torch_names(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor",
        "from torch._functorch import config",
        "from torch import _dynamo",
        "import torch\ntorch._C",
        "import torch.fx as f\nf.node._side_effectful_functions",
        "from torch import fx\nfx._symbolic_trace",
        "import torch\ngetattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_private_torch_names_are_found(source: str) -> None:
    assert private_torch_names(source)


def test_public_torch_names_are_left_alone() -> None:
    assert not private_torch_names(
        "import torch\ntorch.__version__\ntorch.fx.Graph\nself._torch._x"
    )


def _run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs code as a user would, with their folder first on the path and ours after it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["runtime", "tracer"])
@pytest.mark.parametrize("first", ["", "import {name}; "])
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str, first: str) -> None:
    theirs = tmp_path / f"{name}.py"
    theirs.write_text("print('theirs ran')\n")
    done = _run(first.format(name=name) + "import planner", tmp_path)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert f"{theirs} is in the way" in message
    assert done.stdout == ("theirs ran\n" if first else "")


def test_a_package_in_the_way_is_named(tmp_path: Path) -> None:
    theirs = tmp_path / "runtime" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    done = _run("import planner", tmp_path)
    assert f"{theirs} is in the way" in done.stderr


def test_a_folder_that_is_no_package_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "notes.txt").write_text("")
    done = _run("import planner, runtime; print(runtime.__file__)", tmp_path)
    assert done.stdout.strip() == str(ROOT / "runtime" / "__init__.py"), done.stderr
