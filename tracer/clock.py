"""Wall time on a CPU that other processes use too."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any


def undisturbed_ns(call: Callable[[], Any]) -> int:
    """Wall time of a call, without the time in which its threads waited for a core.

    Threads share the work and wait for the last of them, so the longest wait is what other
    processes added; unless it fell between reading it and the call, hence the lower limit, the time
    that the calling thread was on a core.
    """
    before, cpu_start = _waited_ns(), time.thread_time_ns()
    start = time.perf_counter_ns()
    call()
    elapsed = time.perf_counter_ns() - start
    on_cpu, after = time.thread_time_ns() - cpu_start, _waited_ns()
    waited = max((after[t] - before.get(t, 0) for t in after), default=0)
    return max(1, elapsed - waited, min(elapsed, on_cpu))


def _waited_ns() -> dict[str, int]:
    """For each thread of this process how long it could have run but another one had the core.

    Empty where the system does not tell (it is the second number in Linux's schedstat).
    """
    waited = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                waited[thread] = int(file.read().split()[1])
    return waited
