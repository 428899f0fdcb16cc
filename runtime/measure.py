"""Measures what a training step really holds and how long it takes.

CPU and CUDA count the same thing, the bytes that torch's allocator has handed out:

- on CUDA the allocator keeps the peak itself;
- on CPU `torch.profiler`'s memory events are summed up. They leave out the freeing of memory that
  was allocated before the profiler started, so the storages of the given objects (gradients that
  the step drops, for instance) are watched, and their end is noted among the events.

`process_peak` asks the operating system instead, for a figure that owes nothing to torch.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.profiler import profile, record_function

from tracer.allocator import allocated_bytes
from tracer.torch_private import inner_tensors

# glibc then gives every larger block its own mapping and returns it at once: without this the
# resident memory also holds what torch has freed.
MALLOC_ENV: Final[Mapping[str, str]] = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

_MEMORY_EVENT = "[memory]"
_FREED_EVENT = "checkpoint-planner freed "


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call of a step held and took.

    Attributes:
        added_bytes: most bytes allocated at one time over what was allocated before the call.
        peak_bytes: `added_bytes` plus what the given objects held before the call; compares with
            `Plan.peak_bytes`.
        seconds: wall time of that call. On CPU the profiler runs along (it costs a few
            microseconds for each operator): to compare times, use `median_seconds`.
        reserved_bytes: most bytes that the CUDA allocator had taken from the device; 0 on CPU.
    """

    added_bytes: int
    peak_bytes: int
    seconds: float
    reserved_bytes: int = 0


def measure(
    step: Callable[[], object],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: object = None,
) -> Measurement:
    """Calls `step` once and measures it.

    `step` is called exactly once, since a second call would train twice: run it before if the
    first call does more than the later ones (building optimizer state, planning). The objects say
    what is held around the step; each storage counts once however many tensors share it. With none
    of them `peak_bytes` is `added_bytes`.

    On CPU, the freeing of memory that was allocated before the call and belongs to none of the
    given objects is not seen: `added_bytes` can then be too high, never too low.

    Args:
        step: what to measure, without arguments. What it returns is dropped.
        model: its parameters, their gradients, and buffers count as held.
        optimizer: its parameters, their gradients, and its state count as held.
        inputs: a tensor, or containers of tensors, that count as held.

    Raises:
        ValueError: the objects lie on several CUDA devices, or on a device that is neither CPU nor
            CUDA.
    """
    device, storages = held_storages((model, optimizer, inputs))
    if device.type == "cuda":
        return _measure_cuda(step, storages, device)
    return _measure_cpu(step, storages)


def held_storages(things: object) -> tuple[torch.device, list[torch.UntypedStorage]]:
    """The device on which things lie, and the storages behind them, each once.

    Raises:
        ValueError: as `measure`.
    """
    tensors = list(_tensors(things))
    device = _device(tensors)
    storages = _storages(tensors, device)
    del tensors
    gc.collect()  # garbage of earlier steps is freed now, not at some moment of this one
    return device, storages


def process_peak(step: Callable[[], object]) -> int:
    """Calls `step` once and returns the most bytes by which it raised the resident memory.

    For CPU on Linux. Everything that the process touches counts, so `step` should have run before
    (code and tables that are loaded once would count too).

    Raises:
        RuntimeError: the process was started without `MALLOC_ENV`, or this is not Linux.
    """
    if any(os.environ.get(name) != value for name, value in MALLOC_ENV.items()):
        wanted = " ".join(f"{name}={value}" for name, value in MALLOC_ENV.items())
        raise RuntimeError(f"freed memory is only seen in a process started with {wanted}")
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        raise RuntimeError("the peak of the resident memory can be read on Linux only")
    gc.collect()
    clear.write_text("5")  # sets VmHWM, the high-water mark, back to VmRSS
    before = _process_bytes("VmHWM")
    step()
    return _process_bytes("VmHWM") - before


def median_seconds(steps: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median wall time of each step, of `interleaved_seconds`."""
    seconds = interleaved_seconds(steps, rounds)
    return {name: statistics.median(times) for name, times in seconds.items()}


def interleaved_seconds(
    steps: Mapping[str, Callable[[], object]], rounds: int = 5
) -> dict[str, list[float]]:
    """Wall times of each step, one a round, for comparing them in one process.

    Each round calls every step once, so that a slow moment of the machine hits all of them alike;
    every second round goes backwards, so that none always follows the same other one, whose caches
    and freed memory it finds. One round more, first, warms up and is not counted. CUDA is waited
    for.

    Raises:
        ValueError: fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            _wait_for_cuda()
            start = time.perf_counter()
            steps[name]()
            _wait_for_cuda()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def _wait_for_cuda() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _measure_cpu(step: Callable[[], object], storages: list[torch.UntypedStorage]) -> Measurement:
    held = sum(s.nbytes() for s in storages)
    profiler, seconds = profiled(step, storages)
    added = max((current for _, current in running_bytes(profiler)), default=0)
    return Measurement(max(0, added), held + max(0, added), seconds)


def profiled(step: Callable[[], object], storages: list[torch.UntypedStorage]) -> tuple[Any, float]:
    """Calls `step` under torch's profiler and watches storages; empties their list.

    Returns:
        The profiler, and the seconds that the call took.
    """
    # Kineto reads this at its first use; without it each start and stop prints a line.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(use_cpu=True, profile_memory=True) as profiler:
        watches = [
            weakref.ref(s, functools.partial(_note_freed, s.data_ptr(), s.nbytes()))
            for s in storages
        ]
        storages.clear()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        watches.clear()
    return profiler, seconds


def _note_freed(address: int, nbytes: int, _: object) -> None:
    """Puts the end of a watched storage among the profiler's events, on the same clock."""
    with record_function(f"{_FREED_EVENT}{address} {nbytes}"):
        pass


def _changes(profiler: Any) -> list[tuple[int, int, int, bool]]:
    """(time, address, bytes, watched) of each allocation and, negative, each freeing on the CPU.

    The event tree is what was recorded. `profiler.events()` would make a Python object of each
    operator's event first: seconds for ten thousand operators.
    """
    changes = []
    events = profiler.kineto_results.experimental_event_tree()
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == _MEMORY_EVENT:
            block = event.extra_fields
            if block.device.type == "cpu":
                changes.append((event.start_time_ns, block.ptr, block.alloc_size, False))
        elif event.name.startswith(_FREED_EVENT):
            address, nbytes = map(int, event.name.removeprefix(_FREED_EVENT).split())
            changes.append((event.start_time_ns, address, -nbytes, True))
    changes.sort(key=lambda change: change[0])
    return changes


def running_bytes(profiler: Any) -> Iterator[tuple[int, int]]:
    """(time, bytes held over the beginning) after each allocation and freeing on the CPU.

    The profiler does report the freeing of a watched storage if an earlier profiler saw its
    allocation; it counts once.
    """
    current = 0
    counted: set[int] = set()  # addresses that were freed by the watch's word
    for time_ns, address, nbytes, watched in _changes(profiler):
        if watched:
            counted.add(address)
        elif address in counted:
            counted.discard(address)
            if nbytes < 0:
                continue
        current += nbytes
        yield time_ns, current


def _measure_cuda(
    step: Callable[[], object], storages: list[torch.UntypedStorage], device: torch.device
) -> Measurement:
    held = sum(allocated_bytes(s.nbytes(), "cuda") for s in storages)
    storages.clear()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    added = torch.cuda.max_memory_allocated(device) - before
    return Measurement(added, held + added, seconds, torch.cuda.max_memory_reserved(device))


def _device(tensors: Iterable[torch.Tensor]) -> torch.device:
    devices = {t.device for t in tensors} - {torch.device("cpu"), torch.device("meta")}
    if any(d.type != "cuda" for d in devices):
        raise ValueError(f"cannot measure on {', '.join(sorted(map(str, devices)))}")
    if len(devices) > 1:
        raise ValueError(f"measure one of {', '.join(sorted(map(str, devices)))} at a time")
    if devices:
        return devices.pop()
    if not tensors and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    found = (t.untyped_storage() for t in tensors if t.device == device)
    return list({s.data_ptr(): s for s in found if s.nbytes()}.values())


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    """Every plain tensor in modules, optimizers and containers, gradients included."""
    if isinstance(thing, torch.Tensor):
        yield from inner_tensors(thing)
        if thing.is_leaf and thing.grad is not None:
            yield from inner_tensors(thing.grad)
    elif isinstance(thing, torch.nn.Module):
        yield from _tensors((*thing.parameters(), *thing.buffers()))
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _tensors((thing.param_groups, thing.state))
    elif isinstance(thing, Mapping):
        yield from _tensors(tuple(thing.values()))
    elif isinstance(thing, list | tuple | set | frozenset):
        for item in thing:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from _tensors(tuple(vars(thing).values()))


def _process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
