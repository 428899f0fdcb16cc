"""The table of `docs/how-to/what-fits.md`, from runs of `examples/what_fits.py`.

`python -m benchmarks.what_fits_table` prints it from the results in `docs/benchmarks/fits`. What is
not there is made first: BERT-Large and BERT-Base at sequences of 128 and 512, some minutes each; no
model is run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.process import ROOT

RUNS = [(size, sequence) for size in ("large", "base") for sequence in (512, 128)]
ARTICLE = {("large", 512): (28, 120), ("large", 128): (93, 562)}
ARTICLE_SLOWDOWN = 0.225
FITS = ROOT / "docs" / "benchmarks" / "fits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FITS, help="of files SIZE-SEQUENCE.json")
    print("\n".join(lines(parser.parse_args().folder)))


def lines(folder: Path = FITS) -> list[str]:
    """The table in Markdown."""
    heads = ["model", "sequence", "plain", "with a plan", "at the article's factor", "article"]
    rows = [row(size, sequence, _found(size, sequence, folder)) for size, sequence in RUNS]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *rows]


def _found(size: str, sequence: int, folder: Path) -> dict[str, Any]:
    file = folder / f"{size}-{sequence}.json"
    if not file.exists():
        command = [sys.executable, "examples/what_fits.py", "--size", size, "--json"]
        command += ["--sequence", str(sequence)]
        text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def row(size: str, sequence: int, found: dict[str, Any]) -> str:
    """One line of the table."""
    from examples.what_fits import FACTOR

    plain, largest = found["largest_plain"], found["largest"]
    wanted = round(plain * FACTOR[sequence])
    point = min(found["curve"], key=lambda p: abs(p["size"] - wanted))
    at = (
        f"{point['size']}: {point['overhead']:+.1%} a step (bound {point['lower_bound']:+.1%}), "
        f"{1 / (1 + point['overhead']) - 1:+.1%} throughput"
    )
    article = "not given"
    if (size, sequence) in ARTICLE:
        before, after = ARTICLE[size, sequence]
        article = f"{before} to {after}, {-ARTICLE_SLOWDOWN:+.1%} throughput"
    return f"| BERT-{size} | {sequence} | {plain} | {largest} | {at} | {article} |"


if __name__ == "__main__":
    main()
