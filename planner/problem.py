"""What every solver gets and gives: one signature for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tracer.graph import ComputationGraph


@dataclass(frozen=True)
class Problem:
    """Find the order of operations of least time whose simulated peak is within the budget.

    Attributes:
        graph: the step.
        budget_bytes: most bytes that the simulator may report as peak, fixed part included.
        keep: forward values (indices) that must never be made again: their producers run once.
        recompute: forward values that must not be held at the boundary.
    """

    graph: ComputationGraph
    budget_bytes: int
    keep: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        order: operation indices; repeated ones run again. Judge it with the simulator.
        bound_ns: proven least step time of any schedule within the budget, 0 if none was proven.
        exact: whether the solver proved `order` optimal for the cost model.
        winner: for a solver that tries others, the name of the one whose order this is.
    """

    order: tuple[int, ...]
    bound_ns: int = 0
    exact: bool = False
    winner: str = ""


class Solver(Protocol):
    """A function of this shape is a solver.

    Raises:
        tracer.errors.InfeasibleBudget: it found no schedule within the budget.
    """

    def __call__(self, problem: Problem, *, time_limit: float) -> Solution: ...
