"""Solvers: one file each, one signature (`planner.problem.Solver`), found by name in `SOLVERS`."""

from __future__ import annotations

from planner.problem import Solver
from planner.solvers import auto, baselines, chain, exhaustive, greedy, ilp, staged

SOLVERS: dict[str, Solver] = {
    "auto": auto.solve,
    "chain": chain.solve,
    "exhaustive": exhaustive.solve,
    "greedy": greedy.solve,
    "ilp": ilp.solve,
    "per_block": baselines.per_block,
    "save_all": baselines.save_all,
    "sqrt": baselines.sqrt,
    "staged": staged.solve,
}

__all__ = ["SOLVERS"]
