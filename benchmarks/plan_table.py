"""Overhead at a range of budgets: ours, the proven bound, the baselines, and what peers do.

Run with `python -m benchmarks.plan_table`; `--growth` shows how solving grows with depth instead. A
budget is the fixed part (parameters, buffers, inputs) plus a share of what the plain step peaks at
above it; share 0 stands for the least feasible budget. All orders are judged by the same simulator
at their true peak; a dash means that nothing fits. Tracing a model takes up to a minute:
`--graphs FOLDER` keeps the graphs.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.plan_page import summary
from planner.instance import Instance
from planner.minimum import minimum_peak
from planner.problem import Problem
from planner.solvers import SOLVERS
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tests.graphs import transformer_graph
from tracer.errors import InfeasibleBudget
from tracer.graph import ComputationGraph

SHARES = (0.7, 0.5, 0.4, 0.3, 0.25, 0.0)
BASELINES = ("greedy", "sqrt", "per_block")
PEERS: dict[str, Callable[[Instance, int], Iterable[Sequence[int]]]] = {
    "rotor": peers.rotor,
    "block": lambda instance, budget: peers.per_block(instance),
    "mincut": lambda instance, budget: peers.min_cut_knapsack(instance),
}
GROWTH = (24, 96, 384, 1000)
GROWTH_SHARE = 0.4


@dataclass(frozen=True)
class Row:
    """One model at one budget; overheads as fractions of the plain step."""

    model: str
    hardware: str
    share: float
    budget_bytes: int
    overhead: float | None
    bound: float
    solver: str
    seconds: float
    others: dict[str, float | None]

    @property
    def gap(self) -> float | None:
        """In fractions of the plain step."""
        return None if self.overhead is None else self.overhead - self.bound


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="comma-separated; all by default")
    parser.add_argument("--hardware", default="v100-32gb,a100-80gb")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the plain peak")
    parser.add_argument("--graphs", type=Path, help="folder that keeps traced graphs")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--growth", nargs="*", type=int, metavar="LAYERS", help="time against depth instead"
    )
    args = parser.parse_args(arguments)
    if args.growth is not None:
        depths = []
        for layers in args.growth or GROWTH:
            depths.append(growth(layers))
            print(" ".join(f"{k} {v:g}" for k, v in depths[-1].items()), flush=True)
            if args.json:
                args.json.write_text(json.dumps(depths, indent=1))
        return
    rows = []
    for row in table(args):
        rows.append(row)
        print(line(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    print(summary([asdict(r) for r in rows]))


def table(args: argparse.Namespace) -> Iterator[Row]:
    """The rows, model by model."""
    from benchmarks.models import MODELS

    print(head())
    for model in args.models.split(",") if args.models else MODELS:
        for hardware in args.hardware.split(","):
            graph = load(model, hardware, args.graphs)
            others = {} if args.no_peers else peer_orders(graph)
            for share in map(float, args.shares.split(",")):
                yield solve(model, hardware, share, graph, others, args)


def load(model: str, hardware: str, folder: Path | None) -> ComputationGraph:
    """The graph, from the folder if it is there."""
    file = None if folder is None else folder / f"{model}@{hardware}.json"
    if file is not None and file.exists():
        return ComputationGraph.from_dict(json.loads(file.read_text()))
    from benchmarks.models import graph_of

    graph = graph_of(model, hardware)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(graph.to_dict()))
    return graph


def budget_of(graph: ComputationGraph, share: float) -> int:
    """The fixed part plus a share of what the plain step peaks at above it, or the least."""
    if share == 0:
        return minimum_peak(graph)[0]
    plain = simulate(graph, Schedule.from_order(graph, save_all_order(graph)))
    return graph.fixed + int(share * (plain.peak_bytes - graph.fixed))


Priced = list[tuple[int, int]]  # (peak, time) of orders


def peer_orders(graph: ComputationGraph) -> dict[str, Priced]:
    """Those that do not depend on the budget."""
    instance = Instance(Problem(graph, 0))
    return {
        name: [(instance.peak(order), instance.time_of(order)) for order in make(instance, 0)]
        for name, make in PEERS.items()
        if name != "rotor"
    }


def solve(
    model: str,
    hardware: str,
    share: float,
    graph: ComputationGraph,
    others: dict[str, Priced],
    args: argparse.Namespace,
) -> Row:
    """Our plan and everybody else's at one budget."""
    budget = budget_of(graph, share)
    least, _ = minimum_peak(graph)
    problem = Problem(graph, budget)
    if budget < least:
        return Row(model, hardware, share, budget, None, 0.0, "infeasible", 0.0, {})
    start = time.perf_counter()
    found = SOLVERS["auto"](problem, time_limit=args.time_limit)
    seconds = time.perf_counter() - start
    price = simulate(graph, Schedule.from_order(graph, found.order))
    assert price.peak_bytes <= budget
    base = graph.time_ns
    compared = {} if args.no_peers else compare(problem, others)
    return Row(
        model,
        hardware,
        share,
        budget,
        price.time_ns / base - 1,
        max(found.bound_ns, base) / base - 1,
        found.winner,
        seconds,
        {k: None if t is None else t / base - 1 for k, t in compared.items()},
    )


def compare(problem: Problem, others: dict[str, Priced]) -> dict[str, int | None]:
    """Step time of each baseline and peer within the budget, None if it has none."""
    instance = Instance(problem)
    times: dict[str, int | None] = {}
    for name in BASELINES:
        try:
            times[name] = instance.time_of(SOLVERS[name](problem, time_limit=60).order)
        except InfeasibleBudget:
            times[name] = None
    rotor = [
        (instance.peak(o), instance.time_of(o))
        for o in PEERS["rotor"](instance, problem.budget_bytes)
    ]
    for name, priced in {**others, "rotor": rotor}.items():
        times[name] = min((t for peak, t in priced if peak <= problem.budget_bytes), default=None)
    return times


COLUMNS = (*BASELINES, "rotor", "block", "mincut")


def head() -> str:
    names = " ".join(f"{n:>9}" for n in ("ours", "bound", "gap", "seconds", *COLUMNS))
    return f"{'model':17} {'hardware':9} {'budget':>13} {names}  found by"


def line(row: Row) -> str:
    budget = f"{row.share:4.0%} {row.budget_bytes / 1e9:5.2f} GB"
    if row.overhead is None or row.gap is None:
        return f"{row.model:17} {row.hardware:9} {budget:>13}  below the least feasible budget"
    figures = [row.overhead, row.bound, row.gap]
    cells = [f"{x:9.2%}" for x in figures] + [f"{row.seconds:9.1f}"]
    cells += [_cell(row.others.get(name)) for name in COLUMNS]
    return f"{row.model:17} {row.hardware:9} {budget:>13} {' '.join(cells)}  {row.solver}"


def _cell(overhead: float | None) -> str:
    return f"{'-':>9}" if overhead is None else f"{overhead:9.2%}"


def growth(layers: int) -> dict[str, float]:
    """Time, overhead and process peak for a BERT-like model of that many equal layers."""
    graph = transformer_graph(layers)
    problem = Problem(graph, budget_of(graph, GROWTH_SHARE))
    start = time.perf_counter()
    found = SOLVERS["auto"](problem, time_limit=600)
    seconds = time.perf_counter() - start
    price = simulate(graph, Schedule.from_order(graph, found.order))
    assert price.peak_bytes <= problem.budget_bytes
    return {
        "layers": layers,
        "operations": len(graph.operations),
        "seconds": seconds,
        "overhead": price.time_ns / graph.time_ns - 1,
        "bound": found.bound_ns / graph.time_ns - 1,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
