"""Overhead at many budgets, from the least feasible one up: it must not rise, nor the peak exceed.

    python -m benchmarks monotone --graphs FOLDER --solver sweep

`sweep` is what `planner.frontier` runs: monotone by construction, which is checked here. `auto` is
what single plans get: each stands alone, and may be above a neighbour by less than its gap. Also
renames the operations' modules, values and names, which must not change a plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.plan_table import load
from planner.instance import Instance
from planner.minimum import minimum_peak
from planner.problem import Problem, Solution
from planner.solvers import SOLVERS
from planner.sweep import sweep
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.graph import ComputationGraph


def main(given: Sequence[str] | None = None) -> None:
    from benchmarks.models import MODELS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--hardware", default="v100-32gb")
    parser.add_argument("--graphs", type=Path, help="folder that keeps traced graphs")
    parser.add_argument("--solver", choices=("sweep", "auto"), default="sweep")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--time-limit", type=float, default=300.0, help="for all points together")
    args = parser.parse_args(given)
    for name in args.models:
        graph = load(name, args.hardware, args.graphs)
        print(f"{name:17} {report(graph, args.solver, args.points, args.time_limit)}", flush=True)


def report(graph: ComputationGraph, solver: str, points: int, seconds: float) -> str:
    """What was found of one graph, in a line."""
    budgets = evenly(graph, points)
    start = time.perf_counter()
    solutions = solve(graph, budgets, solver, seconds)
    taken = time.perf_counter() - start
    prices = [simulate(graph, Schedule.from_order(graph, s.order)) for s in solutions]
    over = sum(p.peak_bytes > b for p, b in zip(prices, budgets, strict=True))
    rises = [(b.time_ns - a.time_ns) / graph.time_ns for a, b in pairwise(prices)]
    gaps = sorted(
        (p.time_ns - s.bound_ns) / graph.time_ns for p, s in zip(prices, solutions, strict=True)
    )
    middle = points // 2
    other = solve(renamed(graph), budgets[middle : middle + 1], "auto", seconds)
    same = other[0].order == solve(graph, budgets[middle : middle + 1], "auto", seconds)[0].order
    return (
        f"{points} budgets in {taken:.0f} s: {over} over, {sum(r > 0 for r in rises)} rises (most "
        f"{max(0.0, *rises):.3%}), gap median {gaps[middle]:.2%} worst {gaps[-1]:.2%}; renamed: "
        f"{'same plan' if same else 'ANOTHER PLAN'}"
    )


def evenly(graph: ComputationGraph, points: int) -> list[int]:
    """Budgets from the least feasible one to that of the plain step."""
    least, _ = minimum_peak(graph)
    most = Instance(Problem(graph, 0)).peak(save_all_order(graph))
    return [least + (most - least) * i // (points - 1) for i in range(points)]


def solve(
    graph: ComputationGraph, budgets: Sequence[int], solver: str, seconds: float
) -> Sequence[Solution]:
    if solver == "sweep":
        return sweep(Problem(graph, 0), budgets, time_limit=seconds)
    limit = seconds / len(budgets)
    return [SOLVERS["auto"](Problem(graph, b), time_limit=limit) for b in budgets]


def renamed(graph: ComputationGraph) -> ComputationGraph:
    """The same graph under other names."""
    operations = tuple(
        dataclasses.replace(o, name=f"x{len(graph.operations) - o.index}", module="", source="")
        for o in graph.operations
    )
    values = tuple(
        dataclasses.replace(v, name=f"y{len(graph.values) - v.index}") for v in graph.values
    )
    return dataclasses.replace(graph, operations=operations, values=values)


if __name__ == "__main__":
    main()
