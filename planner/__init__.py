# ruff: noqa: E402  (the siblings are checked before anything imports them)
"""checkpoint-planner: put a training step under a memory budget, provably well.

>>> from planner import plan
>>> p = plan(model, batch, budget_gb=32)
>>> print(p)
>>> model = p.apply()
"""

from planner._siblings import check_siblings

check_siblings()  # before anything imports `tracer` or `runtime`

from planner.api import plan
from planner.cuts import CutPoint
from planner.fit import fit
from planner.fit_result import Fit, FitPoint
from planner.frontier import Frontier, FrontierPoint, frontier
from planner.pending import PendingPlan
from planner.plan import Plan
from planner.problem import Problem, Solution
from planner.solvers import SOLVERS
from tracer.errors import (
    InfeasibleBudget,
    InvalidBudget,
    PlannerError,
    StalePlan,
    UnknownHardware,
    UntraceableModel,
)

__all__ = [
    "SOLVERS",
    "CutPoint",
    "Fit",
    "FitPoint",
    "Frontier",
    "FrontierPoint",
    "InfeasibleBudget",
    "InvalidBudget",
    "PendingPlan",
    "Plan",
    "PlannerError",
    "Problem",
    "Solution",
    "StalePlan",
    "UnknownHardware",
    "UntraceableModel",
    "fit",
    "frontier",
    "plan",
]
