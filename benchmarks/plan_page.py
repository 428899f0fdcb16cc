"""The page of `benchmarks.plan_table`: what solvers reach beside other tools, and time by depth.

    python -m benchmarks.plan_page measured.json growth.json --results docs/solvers/measured.json

merges rows into the results file, in the place of older ones, and writes the page beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity_table import table

Row = dict[str, Any]
COLUMNS = ("greedy", "sqrt", "rotor", "block", "mincut")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="what --json wrote")
    parser.add_argument("--results", type=Path, default=Path("docs/solvers/measured.json"))
    args = parser.parse_args(given)
    rows = json.loads(args.results.read_text()) if args.results.exists() else []
    for file in args.files:
        rows = merged(rows, json.loads(file.read_text()))
    args.results.write_text(json.dumps(rows, indent=1) + "\n")
    args.results.with_suffix(".md").write_text(page(rows))


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """New rows in the place of old ones of the same model and budget; the others stay."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("model", "hardware", "share", "layers"))

    fresh = {key(row): row for row in new}
    kept = [fresh.pop(key(row), row) for row in old]
    return kept + list(fresh.values())


def page(rows: list[Row]) -> str:
    """The Markdown page."""
    parts = [_HEAD]
    for hardware in dict.fromkeys(r["hardware"] for r in rows if "share" in r):
        chosen = [r for r in rows if r.get("hardware") == hardware]
        usual, least = ([r for r in chosen if bool(r["share"]) is u] for u in (True, False))
        parts += [f"## {hardware}", summary(usual), models(usual)]
        if least:
            parts += [f"### {hardware}, the least feasible budget", summary(least), models(least)]
    deep = sorted((r for r in rows if "layers" in r), key=lambda r: int(r["layers"]))
    if deep:
        parts += [_GROWTH, growth(deep)]
    return "\n\n".join(parts) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Median and worst gap, in points of the plain step's time, and the longest time."""
    found = [r for r in rows if r["overhead"] is not None]
    if not found:
        return "No budget is feasible."
    gaps = sorted(100 * (r["overhead"] - r["bound"]) for r in found)
    slowest = max(r["seconds"] for r in found)
    wide = sum(g > 2 for g in gaps)
    return (
        f"{len(found)} of {len(rows)} budgets are feasible. Median gap {gaps[len(gaps) // 2]:.2f}, "
        f"worst {gaps[-1]:.2f}, {wide} above 2; the slowest took {slowest:.0f} s."
    )


def models(rows: Sequence[Row]) -> str:
    """One line for each model and budget."""
    heads = ["model", "budget", "GB", "ours", "bound", "gap", "s", *COLUMNS]
    return table(heads, [_cells(r) for r in rows])


def _cells(row: Row) -> list[str]:
    share = f"{row['share']:.0%}" if row["share"] else "least"
    cells = [row["model"], share, f"{row['budget_bytes'] / 1e9:.2f}"]
    if row["overhead"] is None:
        return [*cells, "below the minimum", *[""] * (3 + len(COLUMNS))]
    gap = row["overhead"] - row["bound"]
    cells += [f"{100 * x:.2f}" for x in (row["overhead"], row["bound"], gap)]
    cells.append(f"{row['seconds']:.0f}")
    others = (row["others"].get(name) for name in COLUMNS)
    return cells + ["-" if x is None else f"{100 * x:.1f}" for x in others]


def growth(rows: Sequence[Row]) -> str:
    """One line for each depth."""
    heads = ["layers", "operations", "seconds", "overhead", "bound", "peak of the process"]
    lines = [
        [
            f"{r['layers']:,}",
            f"{r['operations']:,}",
            f"{r['seconds']:.1f}",
            f"{100 * r['overhead']:.2f}",
            f"{100 * r['bound']:.2f}",
            f"{r['process_bytes'] / 1e9:.2f} GB",
        ]
        for r in rows
    ]
    return table(heads, lines)


_HEAD = """\
# Measured

<!-- Written by `python -m benchmarks.plan_page`; do not edit. -->

Models are built without weights and priced for a hardware profile. A budget is the fixed part
(parameters, buffers, inputs) plus a share of what the plain step peaks at above it. Overheads and
gaps are in percent of the plain step's time, for the same cost model and judged by the same
simulator at the true peak; "-" means that nothing fits. `python -m benchmarks plan` makes the rows.

- *ours* is what `plan` returns, *bound* what no schedule beats, *gap* their difference, *s* the
  seconds that `auto` took, of 30 allowed, while another model was solved on the same two cores.
- *greedy* and *sqrt* are our [baselines](greedy.md).
- *rotor* is the recurrence of rotor on our blocks: each saves everything inside it, or its input
  only.
- *block* is `torch.utils.checkpoint` around each block, with its early stop.
- *mincut* is torch's partitioner with `activation_memory_budget`: a minimum cut that recomputes no
  heavy operator, then a knapsack over the heavy ones. For each budget the best of twenty settings
  that fits counts.

The least feasible budget is the least peak that our search reaches. There and a little above it
single values, a tenth of the budget each, decide what fits, and operations run many times. The
programs that the bound comes from know few moments of the step at a time, and relaxations hold
fractions of values: the optimum lies somewhere between."""

_GROWTH = """\
## Time against depth

`python -m benchmarks plan --growth`: BERT-like models of equal layers (hidden size 1024, sequence
512, batch 8) at 40 % of the plain peak."""


if __name__ == "__main__":
    main()
