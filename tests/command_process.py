"""Runs the command line, and scripts, in processes of their own.

Each is a process with its own folder, environment, output and exit code. They are forked from a
server that has imported the libraries, which takes longer than most of what they do then.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def command(*arguments: str, cwd: Path, **environment: str) -> Done:
    """Runs `checkpoint-planner` with these arguments."""
    variables = {"CHECKPOINT_PLANNER_CACHE": str(cwd / "cache"), **environment}
    return _forked(_run_command, arguments, cwd, cwd, variables)


def script(line: str, outputs: Path) -> Done:
    """Runs `python <line>` in the project's folder; its outputs are kept in another one."""
    return _forked(_run_script, tuple(shlex.split(line)), ROOT, outputs, {})


def _forked(
    run: Callable[[tuple[str, ...]], object],
    arguments: tuple[str, ...],
    cwd: Path,
    outputs: Path,
    variables: dict[str, str],
) -> Done:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["planner.commands.run", "transformers.modeling_utils"])
    out, err = outputs / ".out", outputs / ".err"
    process = context.Process(target=child, args=(run, arguments, cwd, out, err, variables))
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):  # the server does not take over sys.path
        process.start()
    process.join(timeout=240)
    assert process.exitcode is not None, f"{arguments} did not end"
    return Done(process.exitcode, out.read_text(), err.read_text())


def child(
    run: Callable[[tuple[str, ...]], object],
    arguments: tuple[str, ...],
    cwd: Path,
    out: Path,
    err: Path,
    variables: dict[str, str],
) -> None:
    os.chdir(cwd)
    os.environ.update(variables)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, stream.fileno())
    sys.exit(run(arguments))  # type: ignore[arg-type]


def _run_command(arguments: tuple[str, ...]) -> object:
    from planner.commands.run import main

    sys.argv = ["checkpoint-planner", *arguments]
    return main()


def _run_script(arguments: tuple[str, ...]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
