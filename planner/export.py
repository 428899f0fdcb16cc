"""The plan for other programs: timeline as Chrome trace and CSV, graph as GraphML and DOT."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from planner.cuts import TimelineEntry
from planner.parts import baseline_timeline, operations_by_name, parts, saved_by_name
from tracer.errors import PlannerError
from tracer.graph import Operation

if TYPE_CHECKING:
    from planner.plan import Plan

_BY_ENDING = {".json": "chrome-trace", ".csv": "csv", ".graphml": "graphml", ".dot": "dot"}
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def export(plan: Plan, path: Path, format: str | None = None) -> None:
    """See `Plan.export`."""
    from planner.plan import write

    chosen = format or _BY_ENDING.get(path.suffix.lower())
    if chosen not in FORMATS:
        raise PlannerError(
            f"format={format!r} for {path} is not known: pass one of {', '.join(FORMATS)}, or a "
            f"file name that ends in {', '.join(_BY_ENDING)}"
        )
    write(path, FORMATS[chosen](plan))


def chrome_trace(plan: Plan) -> str:
    """Chrome's trace event format: runs of operations and a counter of the bytes held.

    Both the plan and the step without recomputation are in it, as two processes, on the clock of
    the cost model. Opens in Perfetto and chrome://tracing.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, entries) in enumerate(
        (("plan", plan.timeline), ("no recomputation", baseline_timeline(plan))), start=1
    ):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events.extend(_events(plan, entries, pid))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(plan: Plan, entries: Iterable[TimelineEntry], pid: int) -> Iterator[dict[str, Any]]:
    for start, entry, op in _with_start(plan, entries):
        at = {"pid": pid, "tid": 1, "ts": start / 1e3}
        yield {"ph": "C", "name": "bytes held", **at, "args": {"bytes": entry.bytes}}
        if op is None:
            yield {"ph": "i", "s": "p", "name": entry.what, "cat": entry.what, **at}
            continue
        args = {"module": op.module, "op": op.target, "source": op.source, "bytes": entry.bytes}
        yield {
            **{"ph": "X", "name": entry.name, "cat": entry.what, **at},
            **{"dur": entry.time_ns / 1e3, "args": args},
        }


def timeline_csv(plan: Plan) -> str:
    """One row for each run of an operation, times in ns of the cost model."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(
        ("position", "what", "name", "module", "op", "start_ns", "time_ns", "bytes", "source")
    )
    for position, (start, entry, op) in enumerate(_with_start(plan, plan.timeline)):
        module, target, source = (op.module, op.target, op.source) if op else ("", "", "")
        rows.writerow(
            (
                *(position, entry.what, entry.name, module, target),
                *(start, entry.time_ns, entry.bytes, source),
            )
        )
    return file.getvalue()


def _with_start(
    plan: Plan, entries: Iterable[TimelineEntry]
) -> Iterator[tuple[int, TimelineEntry, Operation | None]]:
    known = operations_by_name(plan)
    start = 0
    for entry in entries:
        yield start, entry, known.get(entry.name) if entry.what != "boundary" else None
        start += entry.time_ns


def to_networkx(plan: Plan) -> nx.DiGraph[str]:
    """The operations as a networkx graph, with what the plan does about each.

    Nodes carry name, op, phase, module, source, time_ns, workspace, runs (2 or more: it runs again)
    and saved_bytes (of its results that are kept from forward to backward); edges carry bytes.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    several = len(parts(plan)) > 1
    for number, part in enumerate(parts(plan)):
        prefix = f"{number}." if several else ""
        runs = Counter(part.order)
        saved = saved_by_name(part)
        for op in part.graph.operations:
            kept = sum(saved.get(part.graph.values[v].name, 0) for v in op.outputs)
            graph.add_node(
                f"{prefix}{op.index}",
                name=without_control(op.name),
                op=without_control(op.target),
                phase=str(op.phase),
                module=without_control(op.module),
                source=without_control(op.source),
                time_ns=op.time_ns,
                workspace=op.workspace,
                runs=runs[op.index],
                saved_bytes=kept,
            )
        for a, b, data in part.graph.dag.edges(data=True):
            nbytes = sum(part.graph.values[v].nbytes for v in data["values"])
            graph.add_edge(f"{prefix}{a}", f"{prefix}{b}", bytes=nbytes)
    return graph


def graphml(plan: Plan) -> str:
    """GraphML, as networkx writes it."""
    return "\n".join(nx.generate_graphml(to_networkx(plan))) + "\n"


def dot(plan: Plan) -> str:
    """Graphviz: kept results have a thick border, what runs again a dashed one."""
    graph = to_networkx(plan)
    lines = ["digraph step {", "  node [shape=box];"]
    for node, data in graph.nodes(data=True):
        again, kept = data["runs"] > 1, data["saved_bytes"] > 0
        styles = ["bold"] * kept + ["dashed"] * again
        words = [data["name"], data["op"], data["module"]]
        words += [f"kept {data['saved_bytes'] / 1e6:.2f} MB"] * kept
        words += [f"runs {data['runs']} times"] * again
        label = "\\n".join(_dot_text(w) for w in words if w)
        lines.append(f'  "{node}" [label="{label}", style="{",".join(styles) or "solid"}"];')
    lines += [f'  "{a}" -> "{b}";' for a, b in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def without_control(text: str) -> str:
    """Without characters that XML cannot hold."""
    return _CONTROL.sub("?", text)


FORMATS = {"chrome-trace": chrome_trace, "csv": timeline_csv, "graphml": graphml, "dot": dot}
