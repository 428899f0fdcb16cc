"""Runs one call for real and measures it: how long, and how many bytes it allocates.

What a call takes inside a step differs from what a tight loop shows: in the loop its inputs lie in
the cache. Before each timed call the cache is therefore swept. The results are freed inside the
timed span, since giving memory back costs time too (and with `malloc` decides whether the next
result meets fresh pages, which must be faulted in).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.profiler import profile
from torch.profiler import DeviceType

from tracer.clock import undisturbed_ns

Call = Callable[[], Any]

_SWEEP = {"cpu": 64 << 20, "cuda": 256 << 20}  # bytes; above the last-level caches of today
_LEAST, _MOST = 5, 50  # samples


class Probe(Protocol):
    """Measures calls on one device."""

    def time_ns(self, call: Call) -> int:
        """Time of one call with a cold cache."""
        ...

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        """What the call returns, and the most bytes that it held over what was held before."""
        ...


class CpuProbe:
    """Measures on the CPU, bytes by the allocator's events."""

    def __init__(self) -> None:
        self._sweep = torch.zeros(_SWEEP["cpu"] // 8, dtype=torch.int64, device="cpu")

    def time_ns(self, call: Call) -> int:
        self._sweep.add_(1)
        return undisturbed_ns(call)

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        # Kineto reads this at its first use; without it each start and stop prints a line.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(use_cpu=True, profile_memory=True) as profiler:
            result = call()
        events = [
            (e.start_ns(), e.nbytes())
            for e in profiler.kineto_results.events()
            if e.name() == "[memory]" and e.device_type() == DeviceType.CPU
        ]
        held = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):
            held += nbytes
            peak = max(peak, held)
        return result, peak


class CudaProbe:
    """Measures on a CUDA device, bytes by the caching allocator's statistics.

    The time is the kernels': the sweep keeps the device busy while the call is queued, so that the
    cost of launching, which runs ahead of the device in a step, is not in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sweep = torch.zeros(_SWEEP["cuda"] // 8, dtype=torch.int64, device=device)

    def time_ns(self, call: Call) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):
            self._sweep.add_(1)
            start.record()
            call()
            end.record()
            end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = call()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device) - before


def probe_for(device: torch.device) -> Probe:
    """The probe of a device.

    Raises:
        ValueError: neither CPU nor CUDA.
    """
    if device.type == "cpu":
        return CpuProbe()
    if device.type == "cuda":
        return CudaProbe(device)
    raise ValueError(f"operations are measured on cpu and cuda, not on {device.type}")


def settled_time_ns(probe: Probe, call: Call, *, seconds: float, relative_error: float) -> int:
    """Time of a call, repeated until it is known well enough.

    Nothing makes a call faster than it is, but another process that takes the core makes it much
    slower: the median of the samples near the fastest counts. Stops when its standard error is
    below `relative_error`, after 50 calls, or when `seconds` are over and there are at least three
    samples. A call that takes longer than `seconds` is timed once or twice.
    """
    end = time.perf_counter() + seconds
    samples = [probe.time_ns(call)]
    while len(samples) < _MOST:
        near = _near_fastest(samples)
        enough = len(near) >= _LEAST and _error(near) < relative_error
        late = time.perf_counter() > end
        if enough or (late and (len(samples) >= 3 or samples[-1] > seconds * 1e9)):
            break
        samples.append(probe.time_ns(call))
    return max(1, round(statistics.median(_near_fastest(samples))))


def _near_fastest(samples: list[int]) -> list[int]:
    """Those within a quarter of the fastest, which is more than undisturbed samples differ by."""
    return [s for s in samples if s <= 1.25 * min(samples)]


def _error(samples: list[int]) -> float:
    """Standard error of the median, relative to it, from the spread of the middle half."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return 0.93 * (high - low) / middle / len(samples) ** 0.5 if middle else 0.0
