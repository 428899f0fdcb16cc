"""Measured costs on disk, so that a model is profiled once and not in every run.

One JSON file for each *environment*: all that changes a measured cost and is not in the signature
of the call (device, torch version, threads, memory allocator). Several processes may read and write
at once: files are replaced whole, under a lock where the system has one, and what another process
has written is kept. A file that cannot be read is ignored with a warning and written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

from tracer.costs import OperationCost

FOLDER_VARIABLE = "CHECKPOINT_PLANNER_CACHE"
_FORMAT = 3  # raise when the meaning of a cost changes: older files are then left alone
_ALLOCATOR_VARIABLES = (
    "LD_PRELOAD",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)

Costs = Mapping[str, OperationCost]
Environment = Mapping[str, str]


@dataclass(frozen=True)
class CacheFile:
    """What one file holds.

    Attributes:
        path: where it is.
        environment: device, torch version, and so on.
        entries: number of costs.
    """

    path: Path
    environment: Environment
    entries: int


class CacheError(ValueError):
    """A file is not an exported cost cache."""


def cache_folder() -> Path:
    """The folder of the cache: `CHECKPOINT_PLANNER_CACHE` if set, else the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("checkpoint-planner")


def environment(device: torch.device) -> Environment:
    """What a cost measured on this device, in this process, depends on besides the call."""
    found = {"format": str(_FORMAT), "torch": torch.__version__}
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = "yes"
    backends: Any = torch.backends
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        return found | _precision(backends.cuda.matmul, backends.cudnn.conv)
    found |= {"device": _cpu_name(), "threads": str(torch.get_num_threads())}
    found |= _precision(backends.mkldnn.matmul, backends.mkldnn.conv)
    return found | {n: os.environ[n] for n in _ALLOCATOR_VARIABLES if os.environ.get(n)}


def _precision(*switches: Any) -> dict[str, str]:
    """How float32 is computed, where that is not the default."""
    chosen = [str(s.fp32_precision) for s in switches]
    return {"float32": "/".join(chosen)} if set(chosen) - {"none", "ieee"} else {}


def load(where: Environment) -> dict[str, OperationCost]:
    """The costs known for an environment; empty if there are none or the file is damaged."""
    path = _path(where)
    try:
        return _costs(_read(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(f"ignoring the damaged cost cache {path}: {error!r}", stacklevel=2)
        return {}


def store(where: Environment, costs: Costs) -> dict[str, OperationCost]:
    """Adds costs to those on disk and returns both; an entry that another process wrote stays.

    A folder that cannot be written to is no error: the costs are then measured again next time.
    """
    try:
        with _lock():
            merged = {**costs, **load(where)}
            _write(where, merged)
        return merged
    except OSError as error:
        warnings.warn(f"cannot keep costs in {cache_folder()}: {error}", stacklevel=2)
        return dict(costs)


def show() -> tuple[CacheFile, ...]:
    """What the cache holds, file by file; damaged files are left out."""
    found = []
    for path in sorted(cache_folder().glob("costs-*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            data = _read(path)
            found.append(CacheFile(path, data["environment"], len(_costs(data))))
    return tuple(found)


def clear() -> int:
    """Deletes the cache's files and returns how many there were."""
    with _lock():
        paths = [p for p in cache_folder().glob("*.json") if p.name.startswith(_PREFIXES)]
        for path in paths:
            path.unlink(missing_ok=True)
    return len(paths)


def export_costs(target: Path) -> int:
    """Writes all costs into one file, to be imported elsewhere; returns their number."""
    files = show()
    _replace(target, [_read(f.path) for f in files])
    return sum(f.entries for f in files)


def import_costs(source: Path) -> int:
    """Adds the costs of an exported file to the cache; returns their number.

    Raises:
        CacheError: the file is not an exported cache. Nothing is imported then.
    """
    try:
        parts = [(dict(d["environment"]), _costs(d)) for d in json.loads(source.read_text("utf-8"))]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CacheError(f"{source} is not an exported cost cache: {error!r}") from error
    for where, costs in parts:
        store(where, costs)
    return sum(len(costs) for _, costs in parts)


def remember(name: str, where: Environment, data: Mapping[str, float]) -> None:
    """Keeps a few numbers about an environment beside the costs, if the folder allows it."""
    with contextlib.suppress(OSError), _lock():
        _replace(_path(where, name), dict(data))


def recall(name: str, where: Environment) -> dict[str, float]:
    """What `remember` kept.

    Raises:
        LookupError: nothing, or nothing readable.
    """
    try:
        data = json.loads(_path(where, name).read_text("utf-8"))
        return {str(k): float(v) for k, v in data.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LookupError(name) from error


_PREFIXES = ("costs-", "benchmark-")


def _path(where: Environment, kind: str = "costs") -> Path:
    text = json.dumps(dict(where), sort_keys=True)
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _costs(data: Any) -> dict[str, OperationCost]:
    return {key: _cost(*entry) for key, entry in data["costs"].items()}


def _cost(time_ns: Any, workspace: Any, outputs: Any) -> OperationCost:
    kept = None if outputs is None else tuple(map(int, outputs))
    cost = OperationCost(int(time_ns), int(workspace), kept)
    if cost.time_ns < 0 or cost.workspace < 0 or min(kept or (0,)) < 0:
        raise ValueError("a negative cost")
    return cost


def _write(where: Environment, costs: Costs) -> None:
    entries = {k: [c.time_ns, c.workspace, c.outputs] for k, c in sorted(costs.items())}
    _replace(_path(where), {"environment": dict(where), "costs": entries})


def _replace(path: Path, data: object) -> None:
    """Writes a file so that readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=0)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One writer at a time. Without `fcntl` (Windows) two may overwrite each other's additions."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cpu_name() -> str:
    """Model and instruction set; the model alone is often hidden from virtual machines."""
    name = platform.processor() or platform.machine()
    file = Path("/proc/cpuinfo")
    if file.exists():
        lines = file.read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores)"
