"""Runs one call for real and measures it: how long, and how many bytes it allocates.

What a call takes inside a step differs from what a tight loop shows: in the loop its inputs lie in
the cache, and `malloc` may give the pages of its results back to the system each time, so that they
must be faulted in again, which takes longer than many a kernel. Before timed calls the cache is
therefore swept, and `Probe.room` makes the room in which a step finds its results. They are freed
inside the timed span, since giving memory back costs time too.

On the CPU one sweep serves several different calls that are small beside the cache, one after the
other as in a step: for short calls it would take a hundred times longer than they do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.profiler import profile
from torch.profiler import DeviceType

from tracer.clock import undisturbed_ns
from tracer.hardware import available_bytes

Call = Callable[[], Any]

_SWEEP = {"cpu": 64 << 20, "cuda": 256 << 20}  # bytes; above the last-level caches of today
_HEAP_BLOCK = (32 << 20) - (1 << 16)  # bytes; at most this much glibc's malloc takes from the heap
_FROM_SYSTEM = 64 << 20  # bytes; a step rarely has a hole for more, so malloc asks the system
_SPARE = 256 << 20  # bytes of a hole beyond what a call needs, since calls leave crumbs in it
_LEAST, _MOST = 5, 50  # samples


class Probe(Protocol):
    """Measures calls on one device."""

    def times_ns(self, calls: Sequence[Call]) -> list[int]:
        """Time of each call, one after the other, with none of their arguments in the cache."""
        ...

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        """What the call returns, and the most bytes that it held over what was held before."""
        ...

    def room(self, nbytes: int, largest: int) -> object:
        """Free memory as a step finds it, while the result is held.

        Args:
            nbytes: what a call allocates in all.
            largest: the largest part of it that is allocated at once.
        """
        ...


class CpuProbe:
    """Measures on the CPU, bytes by the allocator's events; sweeps so many bytes before calls."""

    def __init__(self, swept: int = _SWEEP["cpu"]) -> None:
        self._sweep = torch.zeros(swept // 8, dtype=torch.int64, device="cpu")

    def times_ns(self, calls: Sequence[Call]) -> list[int]:
        self._sweep.add_(1)
        return [undisturbed_ns(call) for call in calls]

    def room(self, nbytes: int, largest: int) -> object:
        """A hole in the heap; nothing for a call with a block that comes from the system anyway.

        Neighbouring blocks become one hole when they are freed; the last of them stays and keeps
        `malloc` from giving the hole back.
        """
        wanted = min(4 * nbytes, nbytes + _SPARE)
        if largest > _FROM_SYSTEM or 4 * wanted > available_bytes(torch.device("cpu")):
            return None
        # Freeing a block that came from the system makes malloc take smaller ones from the heap.
        torch.empty(_HEAP_BLOCK, dtype=torch.uint8, device="cpu")
        return _hole(wanted)

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

    def times_ns(self, calls: Sequence[Call]) -> list[int]:
        return [self._time_ns(call) for call in calls]

    def _time_ns(self, call: Call) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):
            self._sweep.add_(1)
            start.record()
            call()
            end.record()
            end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)

    def room(self, nbytes: int, largest: int) -> object:
        """Nothing to do: the caching allocator keeps what was freed."""

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = call()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device) - before


def _hole(nbytes: int) -> torch.Tensor:
    """Frees neighbouring blocks of so many bytes; the hole stays while the result is held."""
    blocks: list[torch.Tensor] = []
    run, most = 0, 2 * nbytes // _HEAP_BLOCK + 8  # where the heap is in pieces, a run may not come
    while run < nbytes + _HEAP_BLOCK and len(blocks) < most:
        block = torch.zeros(_HEAP_BLOCK, dtype=torch.uint8, device="cpu")
        gap = block.data_ptr() - blocks[-1].data_ptr() - _HEAP_BLOCK if blocks else -1
        run = run + _HEAP_BLOCK if 0 <= gap < 4096 else _HEAP_BLOCK
        blocks.append(block)
    return blocks[-1]


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


def settled_times_ns(
    probe: Probe, calls: Sequence[Call], *, seconds: float, relative_error: float
) -> list[int]:
    """Time of each call, repeated in turns until it is known well enough.

    Nothing makes a call faster than it is, but another process that takes the core makes it much
    slower: the median of the samples near the fastest counts. A call is done when its standard
    error is below `relative_error`, after 50 samples, or when `seconds` for each call are over and
    it has at least three samples. A call that takes longer than `seconds` is timed once or twice.
    """
    end = time.perf_counter() + seconds * len(calls)
    samples: list[list[int]] = [[] for _ in calls]
    open_ones = list(range(len(calls)))
    while open_ones:
        for i, sample in zip(open_ones, probe.times_ns([calls[i] for i in open_ones]), strict=True):
            samples[i].append(sample)
        late = time.perf_counter() > end
        open_ones = [i for i in open_ones if not _enough(samples[i], late, seconds, relative_error)]
    return [max(1, round(statistics.median(_near_fastest(s)))) for s in samples]


def _enough(samples: list[int], late: bool, seconds: float, relative_error: float) -> bool:
    if len(samples) >= _MOST:
        return True
    near = _near_fastest(samples)
    if len(near) >= _LEAST and _error(near) < relative_error:
        return True
    return late and (len(samples) >= 3 or samples[-1] > seconds * 1e9)


def _near_fastest(samples: list[int]) -> list[int]:
    """Those within a quarter of the fastest, which is more than undisturbed samples differ by."""
    return [s for s in samples if s <= 1.25 * min(samples)]


def _error(samples: list[int]) -> float:
    """Standard error of the median, relative to it, from the spread of the middle half."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return 0.93 * (high - low) / middle / len(samples) ** 0.5 if middle else 0.0
