"""Runs the command line in processes of its own.

Each command is a process with its own folder, environment, output and exit code. They are forked
from a server that has imported the library, since importing torch takes longer than most commands.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["planner.commands.run"])
    out, err = cwd / ".out", cwd / ".err"
    variables = {"CHECKPOINT_PLANNER_CACHE": str(cwd / "cache"), **environment}
    process = context.Process(target=child, args=(arguments, cwd, out, err, variables))
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):  # the server does not take over sys.path
        process.start()
    process.join(timeout=120)
    assert process.exitcode is not None, f"{arguments} did not end"
    return Done(process.exitcode, out.read_text(), err.read_text())


def child(
    arguments: tuple[str, ...], cwd: Path, out: Path, err: Path, variables: dict[str, str]
) -> None:
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv = ["checkpoint-planner", *arguments]
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, stream.fileno())
    from planner.commands.run import main

    sys.exit(main())
