"""Graphs of real models as small JSON files: costs and dependences, no names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tracer.graph import ComputationGraph, Kind, Operation, Phase, Value

DATA = Path(__file__).parent / "data"
_KINDS = tuple(Kind)


def save(graph: ComputationGraph, name: str) -> None:
    """Writes `tests/data/NAME.json`."""
    data = {
        "fixed": graph.fixed,
        "accumulate": graph.accumulate,
        "values": [[v.nbytes, _KINDS.index(v.kind)] for v in graph.values],
        "operations": [
            [
                int(op.is_forward),
                op.inputs,
                op.outputs,
                op.time_ns,
                op.workspace,
                int(op.recomputable),
                -1 if op.state is None else op.state,
            ]
            for op in graph.operations
        ],
    }
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")


def load(name: str) -> ComputationGraph:
    """Reads `tests/data/NAME.json`."""
    data = json.loads((DATA / f"{name}.json").read_text())
    operations = tuple(_operation(i, row) for i, row in enumerate(data["operations"]))
    made = {v: op.index for op in operations for v in op.outputs}
    made |= {op.state: op.index for op in operations if op.state is not None}
    values = tuple(
        Value(i, f"v{i}", nbytes, _KINDS[kind], made.get(i))
        for i, (nbytes, kind) in enumerate(data["values"])
    )
    return ComputationGraph(operations, values, (("fixed", data["fixed"]),), data["accumulate"])


def _operation(index: int, row: list[Any]) -> Operation:
    forward, inputs, outputs, time_ns, workspace, recomputable, state = row
    return Operation(
        index,
        f"op{index}",
        "",
        Phase.FORWARD if forward else Phase.BACKWARD,
        tuple(inputs),
        tuple(outputs),
        time_ns,
        workspace,
        bool(recomputable),
        None if state < 0 else state,
    )
