"""The Markdown page of `benchmarks.fidelity`."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

PEAK, LOW, TIME, OVERHEAD = 0.01, 0.005, 0.05, 0.02
"""Limits: of the peak, of the peak below what is measured, of the step time, of the overhead."""

_BUDGETS = {"none": "no recomputation", "half": "half", "tight": "tight"}


def document(rows: list[Row]) -> str:
    """The page: what was measured where, the tables, and how many rows are outside the limits."""
    good = [r for r in rows if "failed" not in r]
    parts = [_HEAD, _environments(good), *_tables(good), _failures(rows)]
    return "\n\n".join(p for p in parts if p) + "\n"


_HEAD = """\
# Predicted against measured

<!-- Written by `python -m benchmarks.fidelity --table`; do not edit. -->

Each model is planned without recomputation and at two tighter budgets: half of the way, and 15 % of
the way, from the least peak to that without recomputation. The step is forward, backward, AdamW's
`step()` and `zero_grad()`; the peak counts parameters, gradients, the optimizer's state, inputs,
values and workspace. "Gradients allocated" means that they stay from step to step. Peaks are those
of torch's allocator. Times are of forward and backward, on CPU without the time for which the
process waited for a core that others had. A shared machine changes its speed by more than a tenth
within a minute, so operations and steps are timed in turns, steps are compared with the operations
before and after them, and the median of the turns counts; *turns* is the range. A row in bold is
outside the limits: peak 1 % (0.5 % where the prediction is lower), time 5 %, overhead 2 points.
Rows are measured anew model by model; times that were not measured in turns are left out."""


def _environments(rows: list[Row]) -> str:
    found = dict.fromkeys(_environment(r) for r in rows)
    return "\n".join(f"- {line}" for line in found)


def _environment(row: Row) -> str:
    found = {k: v for k, v in row["environment"].items() if k != "format"}
    return ", ".join(f"{k} {v}" for k, v in found.items())


def _tables(rows: list[Row]) -> list[str]:
    parts = []
    for gradients in dict.fromkeys(r["gradients"] for r in rows):
        chosen = [r for r in rows if r["gradients"] == gradients]
        outside = sum(peak_outside(r) for r in chosen)
        parts.append(f"## Peak, gradients {gradients}")
        parts.append(f"{len(chosen)} rows, {outside} outside the limits.")
        parts.append(
            table(
                ["model", "budget", "predicted, MB", "measured, MB", "difference, bytes", "%"],
                [_peak(r) for r in chosen],
            )
        )
    timed = [r for r in rows if "turns" in r]
    if timed:
        outside = sum(time_outside(r) for r in timed)
        parts.append("## Time")
        parts.append(f"{len(timed)} rows, {outside} outside the limits.")
        heads = ["model", "gradients", "budget", "predicted, s", "measured, s", "%"]
        heads += ["overhead, predicted", "measured", "points", "turns"]
        parts.append(table(heads, [_time(r) for r in timed]))
    return parts


def peak_outside(row: Row) -> bool:
    """Whether the predicted peak is off by more than the limits."""
    off = row["predicted_peak"] / row["measured_peak"] - 1
    return bool(off > PEAK or off < -LOW)


def time_outside(row: Row) -> bool:
    """Whether the predicted time or overhead is off by more than the limits."""
    off = row["time_off"]
    return bool(abs(off) > TIME or abs(row["overhead"] - row["measured_overhead"]) > OVERHEAD)


def _peak(row: Row) -> list[str]:
    predicted, measured = row["predicted_peak"], row["measured_peak"]
    cells = [f"{predicted / 1e6:.3f}", f"{measured / 1e6:.3f}", f"{predicted - measured:+,}"]
    cells.append(f"{predicted / measured - 1:+.3%}")
    return _marked([row["title"], _BUDGETS[row["budget"]], *cells], peak_outside(row))


def _time(row: Row) -> list[str]:
    predicted, measured = row["predicted_seconds"], row["measured_seconds"]
    points = 100 * (row["overhead"] - row["measured_overhead"])
    cells = [f"{predicted:.3f}", f"{measured:.3f}", f"{row['time_off']:+.1%}"]
    cells += [f"{row['overhead']:.1%}", f"{row['measured_overhead']:.1%}", f"{points:+.1f}"]
    turns = [turn["predicted"] / turn["measured"] - 1 for turn in row["turns"]]
    cells.append(f"{min(turns):+.0%} to {max(turns):+.0%}")
    names = [row["title"], row["gradients"], _BUDGETS[row["budget"]]]
    return _marked([*names, *cells], time_outside(row))


def _marked(cells: list[str], outside: bool) -> list[str]:
    return [f"**{c}**" for c in cells] if outside else cells


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _failures(rows: list[Row]) -> str:
    failed = [r for r in rows if "failed" in r]
    if not failed:
        return ""
    lines = [f"- {r['model']}, gradients {r['gradients']}: {r['failed']}" for r in failed]
    return "## Not measured\n\n" + "\n".join(dict.fromkeys(lines))
