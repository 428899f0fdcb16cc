"""Plan files: versioned JSON, readable on any machine, checked before anything is believed.

The schema is `planner/plan.schema.json` (`checkpoint-planner schema` prints it). A file carries the
computation graph with its costs, so that its figures can be derived again without the model. The
checksum is for accidents and for edits by hand; it is no signature.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from planner.backends import BACKENDS
from planner.cuts import CutPoint, Recomputed, TimelineEntry
from runtime.schedule import Schedule, ScheduleError
from tracer.errors import PlannerError
from tracer.graph import ComputationGraph

if TYPE_CHECKING:
    from planner.plan import Plan

FORMAT = "checkpoint-planner plan"
VERSION = 1


def schema() -> str:
    """The JSON schema of plan files, as text."""
    return (resources.files("planner") / "plan.schema.json").read_text(encoding="utf-8")


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain data, for JSON."""
    apart = ("graph", "pieces", "_engine")
    names = [f.name for f in dataclasses.fields(plan) if f.name not in apart]
    data = {name: _plain(getattr(plan, name)) for name in names}
    data = {"format": FORMAT, "version": VERSION, **data}
    data["pieces"] = [to_dict(piece) for piece in plan.pieces]
    data["graph"] = None if plan.pieces else _plain(plan.graph.to_dict())
    return {**data, "checksum": checksum(data)}


def checksum(data: Mapping[str, Any]) -> str:
    """SHA-256 of the data without its checksum, as JSON with sorted keys and no white space."""
    rest = {k: v for k, v in data.items() if k != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def to_text(data: Mapping[str, Any], indent: int = 1) -> str:
    """JSON with one record on a line, so that line-by-line tools show what differs."""
    lines = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            text = to_text(value, indent + 1).rstrip("\n")
        elif isinstance(value, list) and value and isinstance(value[0], (Mapping, list)):
            margin = " " * (indent + 1)
            text = "[\n" + ",\n".join(margin + json.dumps(v) for v in value) + f"\n{margin[1:]}]"
        else:
            text = json.dumps(value)
        lines.append(" " * indent + f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n" + " " * (indent - 1) + "}\n"


def from_text(text: str, where: str, make: Callable[..., Plan]) -> Plan:
    """The plan that a file holds; `make` is its class.

    Raises:
        PlannerError: not a plan, cut short, changed since it was written, or of another version.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlannerError(
            f"{where} is not a plan file: it is not valid JSON, or was cut short ({error})"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlannerError(f"{where} is not a plan file: it does not say format = {FORMAT!r}")
    if data.get("version") != VERSION:
        raise PlannerError(
            f"{where} is a plan of version {data.get('version')!r}; this library reads version "
            f"{VERSION}. Make the plan again, or use the library that wrote it"
        )
    if data.get("checksum") != checksum(data):
        raise PlannerError(
            f"{where} is a damaged plan file: it was changed after it was written (its checksum "
            "differs). Make the plan again, or change one with plan.edit(...)"
        )
    try:
        return make(**_fields(data, make))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PlannerError(f"{where} is a damaged plan file: {error!r}") from error


_INTEGERS = (
    "budget_bytes",
    "peak_bytes",
    "baseline_peak_bytes",
    "minimum_peak_bytes",
    "saved_bytes",
    "baseline_saved_bytes",
    "optimizer_peak_bytes",
    "step_ns",
    "recompute_ns",
)
_NUMBERS = ("overhead", "lower_bound", "gap", "solve_seconds")
_TEXTS = ("status", "solver", "device", "torch_version", "fingerprint", "cost_fingerprint")


def _fields(data: Mapping[str, Any], make: Callable[..., Plan]) -> dict[str, Any]:
    fields = {name: _of(data, name, int) for name in _INTEGERS}
    fields |= {name: _of(data, name, (int, float)) for name in _NUMBERS}
    fields |= {name: _of(data, name, str) for name in _TEXTS}
    fields["accumulate"] = _of(data, "accumulate", bool)
    fields["order"] = tuple(int(i) for i in data["order"])
    fields["cuts"] = tuple(CutPoint(**{**c, "shape": tuple(c["shape"])}) for c in data["cuts"])
    fields["recomputed"] = tuple(Recomputed(**r) for r in data["recomputed"])
    fields["timeline"] = tuple(TimelineEntry(**t) for t in data["timeline"])
    fields["breakdown"] = tuple((str(k), int(v)) for k, v in data["breakdown"])
    for name in ("notes", "breaks", "keep", "recompute"):
        fields[name] = tuple(str(n) for n in data[name])
    fields["backend"] = _backend(data)
    fields["pieces"] = tuple(make(**_fields(piece, make)) for piece in data["pieces"])
    if fields["pieces"]:  # each has its own graph and order
        return {**fields, "graph": fields["pieces"][0].graph}
    graph = ComputationGraph.from_dict(data["graph"])
    if graph.fingerprint(costs=False) != fields["fingerprint"]:
        raise ValueError("the graph is not the one that its fingerprint names")
    try:
        Schedule.from_order(graph, fields["order"])
    except ScheduleError as error:
        raise ValueError(f"its schedule does not run its graph: {error}") from error
    return {**fields, "graph": graph}


def _backend(data: Mapping[str, Any]) -> str:
    """Left out in files of earlier releases, which had one."""
    backend = data.get("backend", BACKENDS[0])
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}")
    return str(backend)


def _of(data: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = data[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _plain(value: Any) -> Any:
    """The same data in dicts and lists, as JSON gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
