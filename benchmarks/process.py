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

STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment in which glibc's malloc keeps its pages. Other allocators ignore it."""

ROOT = Path(__file__).resolve().parent.parent


def run(
    module: str, arguments: Sequence[str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module arguments` and waits; its whole process group ends with it.

    Raises:
        subprocess.TimeoutExpired: it did not end in `timeout` seconds, and was killed.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **STEADY},
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        finally:  # a time-out, an interrupt, or compilers that the child left behind
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, child.returncode, out, err)
