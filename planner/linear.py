"""Linear and integer programs: one small builder, and the programs that solve it.

HiGHS gets the matrix in one call: PuLP adds column by column and row by row, which for the staged
programs (tens of thousands of columns) takes longer than solving them. Without highspy the same
program goes through PuLP to CBC.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner import highs

INFINITY = math.inf


class ProgramError(RuntimeError):
    """The program has no solution, or its solver found none within its limits.

    Attributes:
        infeasible: proven to have none.
    """

    def __init__(self, message: str, *, infeasible: bool) -> None:
        self.infeasible = infeasible
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """When a solver may stop: relative gap, absolute gap, branch-and-bound nodes, seconds.

    Nodes are the same in every run, seconds are not: prefer nodes.
    """

    gap: float = 0.0
    slack: float = 0.0
    nodes: int | None = None
    seconds: float = INFINITY


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Answer:
    """What a solver says about a program.

    Attributes:
        values: one for each column; empty if a limit came before the first solution.
        objective: of these values.
        bound: proven: no solution has a smaller objective. For a linear program its optimum.
        optimal: solved to the end: no gap beyond the solver's tolerances (1e-6 in integrality and
            feasibility, absolute gap 1e-6).
        duals: one for each row (linear programs only).
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    optimal: bool
    duals: tuple[float, ...] = ()


@dataclass
class Program:
    """Minimise a linear function under named rows; all columns have bounds, some are integers."""

    name: str
    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    column_names: list[str] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def column(
        self,
        name: str,
        cost: float = 0.0,
        *,
        lower: float = 0.0,
        upper: float = 1.0,
        integer: bool = True,
    ) -> int:
        """Adds a column (a binary one unless told otherwise) and returns its index."""
        self.column_names.append(name)
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        name: str,
        terms: Iterable[tuple[int, float]],
        *,
        lower: float = -INFINITY,
        upper: float = INFINITY,
    ) -> int:
        """Adds lower <= sum of coefficient * column <= upper and returns the row's index."""
        self.row_names.append(name)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.starts.append(len(self.indices))
        for index, coefficient in terms:
            self.indices.append(index)
            self.coefficients.append(coefficient)
        return len(self.row_names) - 1

    def solve(
        self,
        limits: Limits = NO_LIMITS,
        *,
        relaxed: bool = False,
        start: dict[int, float] | None = None,
    ) -> Answer:
        """Solves it; `relaxed` forgets that columns are integers.

        `start` is a solution (or part of one) to begin with.

        Raises:
            ProgramError: infeasible, or nothing at all was proven within the limits.
        """
        if not self.cost:  # solvers disagree about programs without columns
            return self._empty()
        try:
            import highspy  # noqa: F401  # it runs in another process
        except ImportError:
            return _solve_cbc(self, limits, relaxed)
        return _solve_highs(self, limits, relaxed, start or {})

    def _empty(self) -> Answer:
        bounds = zip(self.row_lower, self.row_upper, strict=True)
        if any(low > 0 or up < 0 for low, up in bounds):
            raise ProgramError(f"{self.name}: infeasible", infeasible=True)
        return Answer((), 0.0, 0.0, True, (0.0,) * len(self.row_names))


_PARALLEL_ROWS_AND_COLUMNS = 1 << 13  # of HiGHS's presolve rules


def _solve_highs(
    program: Program, limits: Limits, relaxed: bool, start: dict[int, float]
) -> Answer:
    mixed = not relaxed and any(program.integer)
    request = _request(program, limits, mixed, start)
    answer = highs.CHILD.ask(request)
    if answer is None:  # ended: without presolve, where it does not look at the clock
        request["options"]["presolve"] = "off"
        answer = highs.CHILD.ask(request)
    if answer is None:
        raise ProgramError(f"{program.name}: no answer within its limits", infeasible=False)
    if answer["infeasible"]:
        raise ProgramError(f"{program.name}: infeasible", infeasible=True)
    optimal, found, bound = answer["optimal"], answer["found"], answer["bound"]
    if not (optimal if not mixed else found or math.isfinite(bound)):
        raise ProgramError(f"{program.name}: {answer['status']}", infeasible=False)
    values = answer["values"]
    # A stopped integer program may report another objective than that of its solution.
    objective = float(np.dot(program.cost, values)) if found else INFINITY
    complete = optimal and (not mixed or limits.gap == limits.slack == 0.0)
    return Answer(values, objective, bound, complete, answer["duals"])


def _request(
    program: Program, limits: Limits, mixed: bool, start: dict[int, float]
) -> dict[str, Any]:
    """What `planner.highs.solved` takes."""
    return {
        "cost": np.array(program.cost, dtype=float),
        "lower": np.array(program.lower, dtype=float),
        "upper": np.array(program.upper, dtype=float),
        "row_lower": np.array(program.row_lower, dtype=float),
        "row_upper": np.array(program.row_upper, dtype=float),
        "starts": np.array([*program.starts, len(program.indices)], dtype=np.int32),
        "indices": np.array(program.indices, dtype=np.int32),
        "coefficients": np.array(program.coefficients, dtype=float),
        "integer": program.integer if mixed else None,
        "options": _highs_options(limits),
        "start": start,
    }


def _highs_options(limits: Limits) -> dict[str, object]:
    options: dict[str, object] = {
        "output_flag": False,
        "mip_rel_gap": limits.gap,
        "mip_abs_gap": max(1e-6, limits.slack),
        "threads": 1,  # the same answer on every machine
        "random_seed": 0,
        # Presolve of HiGHS 1.16 went round forever, past its time limit, on a boundary program of a
        # BERT; without this rule it does not.
        "presolve_rule_off": _PARALLEL_ROWS_AND_COLUMNS,
    }
    if limits.nodes is not None:
        options["mip_max_nodes"] = limits.nodes
    if math.isfinite(limits.seconds):
        options["time_limit"] = max(0.0, limits.seconds)
    return options


def _solve_cbc(program: Program, limits: Limits, relaxed: bool) -> Answer:
    import pulp

    model, columns = _pulp_model(pulp, program, relaxed)
    solver = pulp.PULP_CBC_CMD(
        msg=False,
        gapRel=limits.gap,
        gapAbs=limits.slack,
        threads=1,
        timeLimit=None if math.isinf(limits.seconds) else limits.seconds,
        options=[] if limits.nodes is None else [f"maxNodes {limits.nodes}"],
    )
    status = model.solve(solver)
    if status == pulp.LpStatusInfeasible:
        raise ProgramError(f"{program.name}: infeasible", infeasible=True)
    if status != pulp.LpStatusOptimal or any(c.varValue is None for c in columns):
        raise ProgramError(f"{program.name}: {pulp.LpStatus[status]}", infeasible=False)
    values = tuple(float(c.varValue) for c in columns)
    objective = sum(c * x for c, x in zip(program.cost, values, strict=True))
    # PuLP does not pass on CBC's bound, so it is known only if CBC ran to the end.
    complete = relaxed or (
        model.sol_status == pulp.LpSolutionOptimal
        and limits.nodes is None
        and limits.gap == limits.slack == 0.0
    )
    bound = objective if complete else _solve_cbc(program, Limits(), True).bound
    return Answer(values, objective, bound, complete)


def _pulp_model(pulp: Any, program: Program, relaxed: bool) -> tuple[Any, list[Any]]:
    model = pulp.LpProblem(program.name, pulp.LpMinimize)
    columns = [
        pulp.LpVariable(
            f"{name}_{i}",
            program.lower[i],
            None if math.isinf(program.upper[i]) else program.upper[i],
            pulp.LpInteger if program.integer[i] and not relaxed else pulp.LpContinuous,
        )
        for i, name in enumerate(program.column_names)
    ]
    model.setObjective(pulp.LpAffineExpression(list(zip(columns, program.cost, strict=True))))
    ends = [*program.starts[1:], len(program.indices)]
    for r, name in enumerate(program.row_names):
        span = range(program.starts[r], ends[r])
        terms = [(columns[program.indices[i]], program.coefficients[i]) for i in span]
        expression = pulp.LpAffineExpression(terms)
        if math.isfinite(program.row_upper[r]):
            model.addConstraint(expression <= program.row_upper[r], f"{name}_{r}_upper")
        if math.isfinite(program.row_lower[r]):
            model.addConstraint(expression >= program.row_lower[r], f"{name}_{r}_lower")
    return model, columns


def memory_unit(budget: int) -> float:
    """Bytes that memory rows count as one: a power of two near a ten-thousandth of the budget.

    HiGHS works with absolute tolerances, so bytes are too fine. A power of two keeps the sizes
    exact; with other units the presolve of HiGHS 1.16 was seen to loop for ever on rounding noise.
    """
    return float(2.0 ** round(math.log2(max(1, budget) / 1e4)))
