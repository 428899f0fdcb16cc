"""What `compare` shows: a line while it runs, a Markdown page, the curve of time against peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fidelity_table import table

Row = dict[str, Any]
WRONG = 1e-2  # relative L2 distance of gradients that no rounding explains
LIMIT = 1.02  # of the ratio of medians, ours to the other at its peak


def line(row: Row) -> str:
    """One variant, while the run goes on."""
    if "failed" in row:
        return f"{row['name']}: failed: {row['failed']}"
    peak, prepare = row["peak"]["allocator"] / 1e6, row["prepare"]["seconds"]
    off = row.get("gradients")
    gradients = "" if off is None else f", gradients off by {off:.1e}"
    return f"{row['name']}: {peak:.1f} MB, prepared in {prepare:.1f} s{gradients}"


def write(base: Path, result: Row) -> None:
    """Writes the page and the curve beside the JSON file."""
    base.with_suffix(".md").write_text(page(result))
    curve(base.with_suffix(".svg"), result)


def page(result: Row) -> str:
    """The Markdown page of one model."""
    rows = result["variants"]
    env = ", ".join(f"{k} {v}" for k, v in result["environment"].items() if k != "format")
    parts = [
        f"# {result['title']}",
        "<!-- Written by `python -m benchmarks compare`; do not edit. -->",
        f"`{result['command']}`, {result['rounds']} rounds, {env}.",
        f"![Step time against peak]({Path(result['model']).name}-{device(result)}.svg)",
        "## Every variant",
        _HEAD,
        _CACHES if result.get("caches_kept") else "",
        table(
            [
                "variant",
                "peak, MB",
                "without gradients before, MB",
                "process, MB",
                "time / eager",
                "prepared in, s",
                "gradients",
                "buffers",
            ],
            [_cells(r) for r in rows],
        ),
        "## Ours at the peak that each of the others reaches",
        _PAIRS,
        table(
            ["variant", "its peak, MB", "ours, MB", "its time / eager", "ours", "ours / it", ""],
            [_pair(a, b) for a, b in pairs(rows)],
        ),
        _claims(rows),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


_HEAD = """\
Peaks are those of a step whose gradients are allocated before it, and, in the next column, of one
that makes them; by torch's allocator, everything counted. *process* is by how much the step raises
the resident memory of the process. Times are ratios of medians to eager's in the same group of
processes, taken in turns. *prepared* is planning, tracing, compiling and the first step.
*gradients* is the relative L2 distance to eager's under the same seed, dropout on; *buffers* says
how many moved otherwise than eager's."""

_CACHES = (
    "As transformers does it, decoders keep their key-value cache unless they are checkpointed."
)

_PAIRS = """\
Each row compares two processes that were timed in turns. A row in bold is slower than the other by
more than 2 %, or over its peak."""


def device(result: Row) -> str:
    return "cuda" if "cuda" in result["environment"] else "cpu"


def _cells(row: Row) -> list[str]:
    if "peak" not in row:
        return [row["name"], *["-"] * 5, f"failed: {row['failed']}", ""]
    process = row["peak"].get("process")
    wrong = row.get("buffers_wrong", 0)
    return [
        row["name"],
        f"{row['peak']['allocator'] / 1e6:.1f}",
        f"{row['dropped']['allocator'] / 1e6:.1f}" if "dropped" in row else "-",
        "-" if process is None else f"{process / 1e6:.1f}",
        f"{row['ratio']:.3f}" if "ratio" in row else "-",
        f"{row['prepare']['seconds']:.1f}",
        _gradients(row),
        "as eager" if not wrong else f"{wrong} wrong",
    ]


def _gradients(row: Row) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row.get("bitwise"):
        return "bitwise"
    off = row.get("gradients")
    if off is None:
        return "-"
    return f"**wrong: {off:.1%}**" if off > WRONG else f"off by {off:.0e}"


def pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """(another tool's, ours at its peak), of those that ran."""
    by_name = {r["name"]: r for r in rows}
    found = []
    for row in rows:
        ours = by_name.get(f"ours at the peak of {row['name']}")
        if ours is not None and "ratio" in row:
            found.append((row, ours))
    return found


def beaten(other: Row, ours: Row) -> bool:
    """Whether ours is no slower, at the same or a lower measured peak."""
    if "ratio" not in ours:
        return False
    fits = ours["peak"]["allocator"] <= other["peak"]["allocator"]
    return bool(fits and ours["seconds"] <= LIMIT * other["seconds"])


def _pair(other: Row, ours: Row) -> list[str]:
    names = [other["name"], f"{other['peak']['allocator'] / 1e6:.1f}"]
    theirs, mine, ratio = f"{other['ratio']:.3f}", "-", "-"
    peak = f"{ours['peak']['allocator'] / 1e6:.1f}" if "peak" in ours else "-"
    note = "its gradients are wrong" if other.get("gradients", 0) > WRONG else ""
    if "ratio" in ours:
        mine, ratio = f"{ours['ratio']:.3f}", f"{ours['seconds'] / other['seconds']:.3f}"
    else:
        note = ours["failed"]
    cells = [*names, peak, theirs, mine, ratio]
    return [*(cells if beaten(other, ours) else [f"**{c}**" for c in cells]), note]


def _claims(rows: list[Row]) -> str:
    """Overhead at one checkpoint per block's peak, peak at half its overhead, the lowest peak."""
    by_name = {r["name"]: r for r in rows}
    lines = []
    share = _share(rows, "ours at the peak of checkpoint per block")
    if share != "-":
        lines.append(f"- At the peak of one checkpoint per block: {share} times its overhead.")
    share = _share(rows, "ours at 1.25 times the peak of checkpoint per block")
    if share != "-":
        lines.append(f"- At 1.25 times its peak: {share} times its overhead.")
    least = by_name.get("ours, the least peak", {})
    theirs = [r for r in rows if r["kind"] not in ("ours", "rotor", "eager") and "peak" in r]
    if "peak" in least and theirs:
        lowest = min(theirs, key=lambda r: r["peak"]["allocator"])
        lines.append(
            f"- Lowest peak: ours {least['peak']['allocator'] / 1e6:.1f} MB; of the others "
            f"{lowest['peak']['allocator'] / 1e6:.1f} MB ({lowest['name']})."
        )
    return "\n".join(lines)


def read(folder: Path) -> list[Row]:
    """The results in a folder, by name."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*-c*.json"))]


def readme(folder: Path, text: str) -> str:
    """The README with the table of results between its marks."""
    start, end = "<!-- results of benchmarks compare -->\n", "<!-- end of results -->"
    head, _, rest = text.partition(start)
    _, _, tail = rest.partition(end)
    rows = [_index_row(r, "docs/benchmarks/") for r in read(folder)]
    return f"{head}{start}\n{table(_INDEX_HEADS, rows)}\n\n{end}{tail}"


def index(folder: Path) -> str:
    """The page over all results in a folder."""
    results = read(folder)
    parts = [_INDEX, table(_INDEX_HEADS, [_index_row(r, "") for r in results])]
    missed = [
        f"- [{r['title']}]({_file(r)}), {a['name']}: {b.get('failed') or _ratio(a, b)}"
        for r in results
        for a, b in pairs(r["variants"])
        if not beaten(a, b)
    ]
    if missed:
        parts += ["## Not beaten", _CAUSES, "\n".join(missed)]
    return "\n\n".join(parts) + "\n"


_INDEX = """\
# Side by side

<!-- Written by `python -m benchmarks compare`; do not edit. -->

Ours beside what people use instead, at the measured peaks that those reach; each page has every
variant, the curve, machine, versions and command. *beaten* counts those than which ours is no
slower (at most 2 %) at the same or a lower measured peak. The next columns are our overhead over
eager as a share of that of one checkpoint per block, at its peak and at 1.25 times its peak; then
the lowest peak that ours and any other reaches."""

_CAUSES = """\
Inductor fuses chains of element-wise operations into one pass over memory; planned modules run
eager kernels."""

_INDEX_HEADS = [
    "model",
    "beaten",
    "overhead at its peak",
    "at 1.25 times",
    "least, MB",
    "others, MB",
]


def _index_row(result: Row, path: str) -> list[str]:
    rows = result["variants"]
    found = pairs(rows)
    others = [r for r in rows if r["kind"] not in ("ours", "rotor", "eager") and "peak" in r]
    least = [r["peak"]["allocator"] for r in rows if r["kind"] == "ours" and "peak" in r]
    return [
        f"[{result['title']}]({path}{_file(result)})",
        f"{sum(beaten(a, b) for a, b in found)} of {len(found)}",
        _share(rows, "ours at the peak of checkpoint per block"),
        _share(rows, "ours at 1.25 times the peak of checkpoint per block"),
        f"{min(least) / 1e6:.1f}" if least else "-",
        f"{min(r['peak']['allocator'] for r in others) / 1e6:.1f}" if others else "-",
    ]


def _share(rows: list[Row], name: str) -> str:
    """Our overhead as a share of one checkpoint per block's."""
    by_name = {r["name"]: r for r in rows}
    block, ours = by_name.get("checkpoint per block", {}), by_name.get(name, {})
    if "ratio" not in block or "ratio" not in ours:
        return "-"
    return f"{(ours['ratio'] - 1) / (block['ratio'] - 1):.2f}"


def _file(result: Row) -> str:
    return f"{result['model']}-{device(result)}.md"


def _ratio(other: Row, ours: Row) -> str:
    return f"{ours['seconds'] / other['seconds']:.3f} times its time"


_MARKS = {"eager": "k*", "ours": "C0o-", "rotor": "C1s", "checkpoint": "C2^", "selective": "C3v"}
_MARKS |= {"segments": "C4D", "compile": "C5x"}


def curve(path: Path, result: Row) -> None:
    """Time against peak; ours joined by a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    timed = [r for r in result["variants"] if "ratio" in r]
    for kind, mark in _MARKS.items():
        points = sorted(
            (r["peak"]["allocator"] / 1e9, r["ratio"]) for r in timed if r["kind"] == kind
        )
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=kind, markersize=6)
    axes.set_xlabel("measured peak, GB (gradients allocated)")
    axes.set_ylabel("step time / eager")
    axes.set_title(result["title"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
