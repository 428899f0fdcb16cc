"""Hardware profiles: a device described by a few numbers, so that one can plan without owning it.

The profiles are data (`tracer/profiles/*.toml`, with their public sources); a file of one's own in
the same form works too. The CPU at hand is measured instead of described.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tracer import cost_cache
from tracer.allocator import cuda_bytes, rounded
from tracer.clock import undisturbed_ns
from tracer.errors import UnknownHardware
from tracer.torch_private import plain_eager

_KINDS = ("matmul", "convolution", "attention", "memory")


@dataclass(frozen=True)
class HardwareProfile:
    """A device in numbers.

    Attributes:
        name: for people.
        device: torch's device type, "cuda" or "cpu".
        memory_bytes: what the device has for everything in a step.
        granularity: the allocator hands out multiples of this many bytes.
        bytes_per_second: peak of the device memory.
        flops: peak operations per second by dtype name ("float32"), multiply and add counted as
            two, as PyTorch runs that dtype by default. "tf32" stands for float32 where the person
            allowed it.
        launch_ns: what an operation takes however little it does.
        tile: matrix kernels compute whole tiles of about this edge.
        efficiency: shares of the peaks that large kernels reach: of flops by kind ("matmul",
            "convolution", "attention"), of the bytes per second ("memory").
        sources: where the numbers are published.
    """

    name: str
    device: str
    memory_bytes: int
    granularity: int
    bytes_per_second: float
    flops: Mapping[str, float]
    launch_ns: int
    tile: int
    efficiency: Mapping[str, float]
    sources: tuple[str, ...] = ()

    def allocated(self, nbytes: int) -> int:
        """Bytes that the allocator counts for a request."""
        request = rounded(nbytes, self.granularity)
        return cuda_bytes(request) if self.device == "cuda" else request

    def flop_rate(self, dtype: torch.dtype, kind: str) -> float:
        """Operations per second that a large kernel reaches; float32's for an unlisted dtype."""
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and self.device == "cuda" and _tf32_allowed(kind):
            name = "tf32"
        peak = self.flops.get(name, self.flops["float32"])
        return peak * self.efficiency[kind]

    @property
    def byte_rate(self) -> float:
        """Bytes per second that a large kernel reaches."""
        return self.bytes_per_second * self.efficiency["memory"]


def profile_names() -> tuple[str, ...]:
    """The names that `load_profile` knows."""
    folder = resources.files("tracer") / "profiles"
    found = [f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")]
    return (*sorted(found), "cpu")


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """A profile by name ("a100-80gb", or "cpu" for the CPU at hand) or from a TOML file.

    Raises:
        UnknownHardware: no such name or file, or the file is not a profile.
    """
    if name_or_path == "cpu":
        return measured_profile(torch.device("cpu"))
    path = Path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        return _parse(path.read_text(encoding="utf-8"), str(path))
    if name_or_path not in profile_names():
        known = ", ".join(profile_names())
        raise UnknownHardware(
            f"no hardware profile {os.fspath(name_or_path)!r}; known are {known}, "
            "or pass the path of a .toml file"
        )
    file = resources.files("tracer") / "profiles" / f"{name_or_path}.toml"
    return _parse(file.read_text(encoding="utf-8"), str(file))


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device of this machine.

    Raises:
        UnknownHardware: the free memory of such a device, or on such a system, cannot be asked.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reusable)
    if device.type != "cpu":
        raise UnknownHardware(f"cannot ask how much memory is free on {device}")
    return min(_system_bytes("MemAvailable"), _container_bytes())


def measured_profile(device: torch.device) -> HardwareProfile:
    """A device of this machine, by a benchmark of a second or two that the cost cache keeps.

    Raises:
        UnknownHardware: neither CPU nor CUDA.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnknownHardware(f"no hardware profile can be measured on {device}")
    where = cost_cache.environment(device)
    numbers = _benchmark(device, tuple(where.items()))
    cpu = device.type == "cpu"
    return HardwareProfile(
        name=where["device"],
        device=device.type,
        memory_bytes=_system_bytes("MemTotal") if cpu else torch.cuda.mem_get_info(device)[1],
        granularity=1 if cpu else 512,  # on CPU torch counts what was asked for
        bytes_per_second=numbers["bytes_per_second"],
        flops={d: numbers[d] for d in _DTYPES},
        launch_ns=round(numbers["launch_ns"]),
        tile=1,
        efficiency=dict.fromkeys(_KINDS, 1.0),  # measured: these are no peaks
    )


_DTYPES = ("float32", "float64", "bfloat16", "float16")


@functools.cache
def _benchmark(device: torch.device, where: tuple[tuple[str, str], ...]) -> Mapping[str, float]:
    with contextlib.suppress(LookupError):
        found = cost_cache.recall("benchmark", dict(where))
        if {*_DTYPES, "bytes_per_second", "launch_ns"} <= found.keys():
            return found
    with plain_eager():
        found = {d: _flop_rate(getattr(torch, d), device) for d in _DTYPES}
        found["bytes_per_second"] = _copy_rate(device)
        found["launch_ns"] = _launch_ns(device)
    cost_cache.remember("benchmark", dict(where), found)
    return found


def _flop_rate(dtype: torch.dtype, device: torch.device) -> float:
    edge = 4096 if device.type == "cuda" else 768 if dtype is torch.float32 else 384
    a = torch.full((edge, edge), 0.5, device=device, dtype=dtype)
    return 2 * edge**3 / _best_seconds(lambda: a @ a, device)


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy into new memory."""
    source = torch.ones(
        (64 if device.type == "cuda" else 4) << 20, dtype=torch.int32, device=device
    )
    return 2 * source.nbytes / _best_seconds(source.clone, device)


def _launch_ns(device: torch.device) -> float:
    small = torch.ones(8, device=device)

    def hundred() -> None:
        for _ in range(100):
            small + small

    return _best_seconds(hundred, device) * 1e7


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    def finished() -> None:
        call()
        _finish(device)

    finished()
    return min(undisturbed_ns(finished) for _ in range(5)) / 1e9


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parse(text: str, where: str) -> HardwareProfile:
    try:
        data: dict[str, Any] = tomllib.loads(text)
        profile = HardwareProfile(
            name=str(data["name"]),
            device=str(data["device"]),
            memory_bytes=int(data["memory_bytes"]),
            granularity=int(data["granularity"]),
            bytes_per_second=float(data["bytes_per_second"]),
            flops={str(k): float(v) for k, v in data["flops"].items()},
            launch_ns=int(data["launch_ns"]),
            tile=int(data["tile"]),
            efficiency={kind: float(data["efficiency"][kind]) for kind in _KINDS},
            sources=tuple(map(str, data.get("sources", ()))),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnknownHardware(f"{where} is not a hardware profile: {error!r}") from error
    numbers = (profile.memory_bytes, profile.granularity, profile.bytes_per_second, profile.tile)
    if min(*numbers, *profile.flops.values(), *profile.efficiency.values()) <= 0:
        raise UnknownHardware(f"{where} is not a hardware profile: a number is not positive")
    if "float32" not in profile.flops:
        raise UnknownHardware(f"{where} is not a hardware profile: flops lack float32")
    return profile


def _tf32_allowed(kind: str) -> bool:
    """Whether the person lets float32 run on tensor cores, which torch's switches say."""
    backends: Any = torch.backends
    switch = backends.cudnn.conv if kind == "convolution" else backends.cuda.matmul
    return bool(switch.fp32_precision == "tf32")


def _system_bytes(field: str) -> int:
    file = Path("/proc/meminfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise UnknownHardware("cannot ask this system how much memory it has") from error


def _container_bytes() -> int:
    """What a control group lets this process have; beyond any machine where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
