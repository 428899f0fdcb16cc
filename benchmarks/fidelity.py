"""Predicted against measured: peak, step time and overhead, for every model of the zoo.

    python -m benchmarks.fidelity --results docs/fidelity.json --table docs/fidelity.md

Each model is planned without recomputation and at two tighter budgets, with gradients dropped after
each step and with gradients that stay allocated, always with AdamW and its state; in a process of
its own. The step is forward, backward, `optimizer.step()` and `zero_grad()`. Peaks are those of
torch's allocator, times those of forward and backward. Since a shared machine is not equally fast
for a minute, operations and steps are timed in turns: all operations, a few steps of each plan, all
operations again, and so on; steps are compared with the operations before and after them. What is
in the results file already is kept, so that models can be measured one by one; `--table` writes
what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.fidelity_table import document
from benchmarks.process import run
from benchmarks.zoo import ZOO, Entry
from planner import Plan, plan
from planner.checks import matched
from planner.engine import Engine
from planner.request import Request, inputs_of
from runtime.measure import measure
from runtime.simulator import simulate
from tracer.clock import undisturbed_ns
from tracer.cost_cache import FOLDER_VARIABLE
from tracer.graph import ComputationGraph

AMPLE_GB = 1e6
ROUNDS = 2  # steps of each plan in a turn
BUDGETS = {"half": 0.5, "tight": 0.15}
"""Share of the way from the least peak to that without recomputation."""

Row = dict[str, Any]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(ZOO), help=", ".join(ZOO))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--copies", type=int, default=1, help="of each batch, for a large device")
    parser.add_argument("--gradients", nargs="+", default=["dropped", "allocated"])
    parser.add_argument("--turns", type=int, default=5, help="for times; 0 leaves them out")
    parser.add_argument("--time-limit", type=float, default=20.0, help="of the solver, seconds")
    parser.add_argument("--results", type=Path, default=Path("fidelity.json"))
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--page-only", action="store_true", help="--table of what is there")
    parser.add_argument("--row", action="store_true", help="(for its own child processes)")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    if args.row:
        rows = measured_rows(args.models[0], args.gradients[0], args)
        print(json.dumps(rows))
        return
    for name in [] if args.page_only else args.models:
        for gradients in args.gradients:
            keep(args.results, in_own_process(name, gradients, args))
    if args.table:
        args.table.write_text(page(json.loads(args.results.read_text())))


def page(rows: list[Row]) -> str:
    """The page of these rows, which names the models that are missing."""
    return document(rows + missing(rows))


def missing(rows: list[Row]) -> list[Row]:
    """A row for each model of the zoo that is not among these, so that the page says so."""
    have = {(r["model"], r["gradients"]) for r in rows}
    wanted = [(name, gradients) for name in ZOO for gradients in ("dropped", "allocated")]
    return [
        {"model": name, "gradients": gradients, "budget": "none", "failed": "not run yet"}
        for name, gradients in wanted
        if (name, gradients) not in have
    ]


def in_own_process(name: str, gradients: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a model, measured in a fresh process; one that says why, if it fails."""
    command = [name, "--row", "--device", args.device]
    command += ["--gradients", gradients, "--turns", str(args.turns)]
    command += ["--time-limit", str(args.time_limit), "--copies", str(args.copies)]
    print(f"{name}, gradients {gradients} ...", file=sys.stderr, flush=True)
    done = run("benchmarks.fidelity", command)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no word"]
        print(done.stderr, file=sys.stderr)
        return [{"model": name, "gradients": gradients, "budget": "none", "failed": reason[0]}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        print(summary(row), file=sys.stderr, flush=True)
    return rows


def summary(row: Row) -> str:
    difference = row["predicted_peak"] / row["measured_peak"] - 1
    text = f"  {row['budget']:6} peak {row['measured_peak'] / 1e6:9.1f} MB {difference:+.3%}"
    if "measured_seconds" in row:
        text += f"  step {row['measured_seconds']:.3f} s {row['time_off']:+.1%}"
        text += f"  overhead {row['measured_overhead']:.1%}, predicted {row['overhead']:.1%}"
    return text


def keep(path: Path, rows: list[Row]) -> None:
    """Puts rows into the results file, in the place of older ones of the same model."""

    def key(row: Row) -> tuple[str, str]:
        return row["model"], row["gradients"]

    new = {key(r) for r in rows}
    old = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([r for r in old if key(r) not in new] + rows, indent=1) + "\n")


@contextlib.contextmanager
def fresh_costs() -> Iterator[None]:
    """Costs are measured anew inside, and not kept."""
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE)
            if before is not None:
                os.environ[FOLDER_VARIABLE] = before


def measured_rows(name: str, gradients: str, args: argparse.Namespace) -> list[Row]:
    entry = ZOO[name]
    step = Step(entry, args.device, kept=gradients == "allocated", copies=args.copies)
    with fresh_costs():
        start = time.perf_counter()
        plans = {"none": step.plan(AMPLE_GB, args.time_limit)}
        planning = time.perf_counter() - start
        ample = plans["none"]
        for budget, share in BUDGETS.items():
            room = ample.baseline_peak_bytes - ample.minimum_peak_bytes
            wanted = ample.minimum_peak_bytes + int(share * room)
            plans[budget] = step.plan(wanted / 1e9, args.time_limit)
    rows = []
    for budget, p in plans.items():
        p.apply()
        step.train()  # the first step makes the optimizer's state
        found = measure(step.train, step.model, step.optimizer, step.batch)
        rows.append(
            {
                "model": name,
                "title": entry.title,
                "gradients": gradients,
                "budget": budget,
                "budget_bytes": p.budget_bytes,
                "predicted_peak": p.peak_bytes,
                "measured_peak": found.peak_bytes,
                "added_bytes": found.added_bytes,
                "recomputed": len(p.recomputed),
                "notes": list(p.notes),
                "overhead": p.overhead,
                "predicted_seconds": p.step_ns / 1e9,
                "planning_seconds": planning,
                "environment": environment(args.device),
            }
        )
        p.remove()
    if args.turns:
        add_times(step, plans, rows, args.turns)
    return rows


def add_times(step: Step, plans: dict[str, Plan], rows: list[Row], turns: int) -> None:
    """Predicted and measured time of each plan, turn by turn, and of the plain module."""
    steps = {"plain": step.plain(plans["none"])} | {n: step.planned(p) for n, p in plans.items()}
    predicted, measured = [prices(step, plans)], []
    for _ in range(turns):
        measured.append(seconds_of(steps, ROUNDS, step.zero_gradients, step.device.type))
        predicted.append(prices(step, plans))
    for row in rows:
        name = row["budget"]
        row["plain_seconds"] = statistics.median(m["plain"] for m in measured)
        row["turns"] = [
            {
                "predicted": (before[name] + after[name]) / 2,
                "measured": m[name],
                "overhead": (before[name] + after[name]) / (before["none"] + after["none"]) - 1,
                "measured_overhead": m[name] / m["none"] - 1,
            }
            for before, m, after in zip(predicted, measured, predicted[1:], strict=False)
        ]
        row |= summed_up(row["turns"])


def summed_up(turns: list[dict[str, float]]) -> Row:
    """Medians over the turns; `time_off` is that of predicted over measured, less 1."""

    def median(name: str) -> float:
        return statistics.median(turn[name] for turn in turns)

    return {
        "predicted_seconds": median("predicted"),
        "measured_seconds": median("measured"),
        "time_off": statistics.median(t["predicted"] / t["measured"] for t in turns) - 1,
        "overhead": median("overhead"),
        "measured_overhead": median("measured_overhead"),
    }


def prices(step: Step, plans: dict[str, Plan]) -> dict[str, float]:
    """Seconds of the step of each plan, with operations that are timed now."""
    for p in plans.values():
        p.remove()
    with fresh_costs():
        graph = step.graph()
    return {name: simulate(graph, matched(p, graph)).time_ns / 1e9 for name, p in plans.items()}


def seconds_of(
    steps: Mapping[str, Callable[[], None]], rounds: int, between: Callable[[], None], device: str
) -> dict[str, float]:
    """Median time of each step. Before them it runs once without being counted.

    In training a step follows one of the same plan. After one of another, which leaves the memory
    in other pieces, it takes some percent longer. What happens `between` two steps is not counted
    either, nor, on CPU, the time for which the process waited for a core.
    """
    clock = undisturbed_ns if device == "cpu" else _wall_ns
    found = {}
    for name, step in steps.items():
        times = []
        for _ in range(rounds + 1):
            times.append(clock(step))
            between()
        found[name] = statistics.median(times[1:]) / 1e9
    return found


def _wall_ns(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    step()
    torch.cuda.synchronize()
    return time.perf_counter_ns() - start


class Step:
    """A training step of one model."""

    def __init__(self, entry: Entry, device: str, *, kept: bool, copies: int = 1) -> None:
        self.entry, self.device, self.kept = entry, torch.device(device), kept
        self.model, self.batch = entry.make(device, copies)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        if kept:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def plan(self, budget_gb: float, time_limit: float) -> Plan:
        with self.autocast():
            return plan(
                self.model,
                self.batch,
                budget_gb=budget_gb,
                optimizer=self.optimizer,
                time_limit=time_limit,
            )

    def graph(self) -> ComputationGraph:
        """The step's graph, traced and priced anew."""
        inputs = inputs_of(self.model, self.batch, None)
        assert inputs is not None
        with self.autocast():
            engine = Engine(self.model, Request(None, self.optimizer, self.device))
            return engine.extract(engine.trace(inputs), inputs).graph

    def planned(self, p: Plan) -> Callable[[], None]:
        """Forward and backward under a plan."""

        def run() -> None:
            p.apply()
            self.backward()

        return run

    def plain(self, p: Plan) -> Callable[[], None]:
        """Forward and backward without; a plan is there to take another one's place."""

        def run() -> None:
            p.apply()
            p.remove()
            self.backward()

        return run

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return self.entry.autocast_on(self.device.type)

    def backward(self) -> None:
        with self.autocast():
            output = self.model(**self.batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.kept)

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.zero_gradients()


def environment(device: str) -> dict[str, str]:
    import diffusers
    import transformers

    from tracer.cost_cache import environment as of_costs

    return {
        **of_costs(torch.device(device)),
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
    }


if __name__ == "__main__":
    main()
