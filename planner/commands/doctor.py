"""`doctor`: what this machine and this installation can do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
import typer

from planner.commands.output import AsJson, CheckFailed, show
from tracer import cost_cache
from tracer.hardware import available_bytes

OK, WARNING, FAILURE = "ok", "warning", "failure"
_OLDEST, _NEWEST = (2, 11), (2, 15)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, how it is, and what to do."""

    what: str
    state: str
    text: str


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(_doctor)


def _doctor(as_json: AsJson = False) -> None:
    """Check torch, the solver, the device, memory settings, and plan a tiny model."""
    found = []
    for check in (_torch, _device, _memory_settings, _solver, _cache, _extras, _plan):
        try:
            found += list(check())
        except Exception as error:  # the doctor reports, whatever it is
            found.append(
                Finding(check.__name__.strip("_"), FAILURE, f"{type(error).__name__}: {error}")
            )
    lines = [f"{f.state:8} {f.what:12} {f.text}" for f in found]
    failures = [f for f in found if f.state == FAILURE]
    show("\n".join(lines), {"findings": [asdict(f) for f in found]}, as_json and not failures)
    if failures:
        raise CheckFailed("; ".join(f"{f.what}: {f.text}" for f in failures))


def _torch() -> Iterator[Finding]:
    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _OLDEST:
        yield Finding("torch", FAILURE, f"{torch.__version__}: install torch 2.11 or later")
    elif numbers > _NEWEST:
        yield Finding("torch", WARNING, f"{torch.__version__} is newer than what was tested (2.15)")
    else:
        yield Finding("torch", OK, torch.__version__)


def _device() -> Iterator[Finding]:
    free = available_bytes(torch.device("cpu"))
    yield Finding("cpu", OK, f"{os.cpu_count()} cores, {free / 1e9:.1f} GB free")
    if not torch.cuda.is_available():
        text = "torch sees none; plan for one that you do not have with --hardware"
        yield Finding("cuda", WARNING, text)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("cuda", OK, f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")


def _memory_settings() -> Iterator[Finding]:
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if not torch.cuda.is_available():
        yield Finding("allocator", OK, _malloc())
    elif "expandable_segments:True" in (settings or ""):
        yield Finding("allocator", OK, settings or "")
    else:
        text = "set PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
        yield Finding("allocator", WARNING, text)


def _malloc() -> str:
    """What to know of the CPU's allocator; see docs/costs.md."""
    if os.environ.get("MALLOC_MMAP_MAX_") == "0":
        return "malloc keeps its pages"
    return (
        "CPU steps are some percent faster, and predicted better, with MALLOC_MMAP_MAX_=0 "
        "MALLOC_TRIM_THRESHOLD_=1099511627776 in the environment (glibc)"
    )


def _answering() -> Finding:
    try:
        return Finding("solver", OK, f"HiGHS {metadata.version('highspy')}")
    except metadata.PackageNotFoundError:
        return Finding("solver", WARNING, "CBC, since highspy is missing: plans take longer")


def _solver() -> Iterator[Finding]:
    from planner.linear import Program

    program = Program("doctor")
    x, y = program.column("x", 1.0), program.column("y", 2.0)
    program.row("either", [(x, 1.0), (y, 1.0)], lower=1.0)
    answer = program.solve()
    if answer.values is None or [round(v) for v in answer.values[:2]] != [1, 0]:
        yield Finding("solver", FAILURE, "HiGHS gives a wrong answer: reinstall highspy")
    else:
        yield _answering()


def _cache() -> Iterator[Finding]:
    folder = cost_cache.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written ({error}): set {cost_cache.FOLDER_VARIABLE}"
        yield Finding("cost cache", WARNING, text)
        return
    free = shutil.disk_usage(folder).free
    entries = sum(f.entries for f in cost_cache.show())
    yield Finding("cost cache", OK, f"{entries} costs in {folder}, {free / 1e9:.0f} GB free there")


def _extras() -> Iterator[Finding]:
    for name, use in (("matplotlib", "reports as .png, .svg and .pdf"),):
        if importlib.util.find_spec(name):
            yield Finding(name, OK, "installed")
        else:
            yield Finding(name, WARNING, f"not installed: needed for {use}")


def _plan() -> Iterator[Finding]:
    """The whole way once: trace, price, solve, apply, compare."""
    from planner.api import plan

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.ones(8, 32)
    made = plan(model, x, budget_gb=1.0)
    verified = made.verify(x)
    if verified.bitwise and verified.within_budget:
        yield Finding("plan", OK, "a tiny model was planned, run, and gave the same gradients")
    else:
        yield Finding("plan", FAILURE, f"a tiny model went wrong: {verified}")
