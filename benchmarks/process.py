"""Child processes of the benchmarks: a fresh one for each measurement, in a steady allocator.

On CPU, `malloc` returns the pages of large blocks to the system and faults them in anew at the next
use, which costs a step several percent, and the more the more memory it holds. Whether it does
depends on what the heap looked like before. The children therefore run in a `malloc` that keeps its
pages, as the caching allocator does on CUDA (docs/costs.md says what that changes).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment in which glibc's malloc keeps its pages. Other allocators ignore it."""

ROOT = Path(__file__).resolve().parent.parent


def start(module: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m module arguments` in a process group of its own, with pipes.

    `options` are those of `subprocess.Popen`; `env` is added to the environment.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        **{**options, "env": {**os.environ, **options.get("env", STEADY)}},
    )


def end(child: subprocess.Popen[str]) -> None:
    """Kills a child with everything that it started: compilers live longer than it."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run(module: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module arguments` and waits; its whole process group ends with it."""
    with start(module, arguments, stderr=subprocess.PIPE) as child:
        try:
            out, err = child.communicate()
        finally:
            end(child)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)
