"""Solvers: one file each, one signature (`planner.problem.Solver`), found by name in `SOLVERS`."""

from __future__ import annotations

from planner.problem import Solver
from planner.solvers import auto, baselines, chain, greedy, staged

SOLVERS: dict[str, Solver] = {
    "auto": auto.solve,
    "chain": chain.solve,
    "greedy": greedy.solve,
    "save_all": baselines.save_all,
    "staged": staged.solve,
}

__all__ = ["SOLVERS"]
