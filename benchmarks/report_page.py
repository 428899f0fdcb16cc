"""Size of the report's page for a model of a hundred layers, and how soon it can be used.

Opens the page in a headless Chromium and prints the milliseconds from navigation to the end of its
script (`data-ready`), when every table, chart and button works. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import nn

from examples.long_sequence import Layer
from planner import plan
from tests.browser import chromium, opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(1024) for _ in range(args.layers)])
        batch = torch.empty(4, 1024, 1024)
    ample = plan(model, batch, budget_gb=1e4, hardware="a100-80gb")
    budget = (ample.minimum_peak_bytes + ample.baseline_peak_bytes) / 2 / 1e9
    made = plan(model, batch, budget_gb=budget, hardware="a100-80gb", solver="greedy")
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "plan.html"
        made.report(path)
        ready = []
        for _ in range(args.rounds):
            opened(browser, path)
            ready.append(
                int(browser.execute_script("return document.documentElement.dataset.ready"))
            )
        print(
            f"{args.layers} layers, {len(made.graph.operations)} operations, {len(made.cuts)} cut "
            f"points: {path.stat().st_size / 1e6:.2f} MB, ready after {statistics.median(ready)} ms"
        )


if __name__ == "__main__":
    main()
