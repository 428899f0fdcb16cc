"""Closes a gap from both sides: staged programs over whole numbers, with all operations allowed.

Where single values are a tenth of the budget, a linear relaxation holds halves of them, and its
optimum is lower than what whole values allow. With few moments the integer program is small enough
for branch and bound, whose dual bound is valid for all schedules, solved to the end or not. An
answer whose order fits the budget is a candidate, and the optimum if the program was solved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.bounds import safe_floor
from planner.decisions import decisions
from planner.instance import Instance
from planner.linear import Limits, ProgramError
from planner.solvers.staged import Found, described, violated
from planner.staged_program import Moment, staged_program

COLUMNS = 8_000  # larger programs do not close
NODES = 1_000
SLACK = 2e-4  # gap, as a fraction of the step, at which a program is solved


@dataclass
class Closing:
    """The gap between the best order and the best bound (ns).

    `found.binding` gives the programs' moments, in its order; where there are fewer, those follow
    at which the last answer's order was over the budget.
    """

    instance: Instance
    found: Found
    bound: int
    moments: set[Moment] = field(default_factory=set)
    seconds: float = 0.0  # that the last program took

    @property
    def closed(self) -> bool:
        return self.found.time_ns <= self.bound + SLACK * self.instance.graph.time_ns

    def run(self, counts: Sequence[int], end: float) -> None:
        """Solves one program for each number of moments, until `end` (monotonic clock)."""
        for count in counts:
            self.moments |= set(self.found.binding[:count])
            start = time.monotonic()
            # HiGHS looks at the clock between steps that may be long ones.
            if self.closed or start + 2 * self.seconds > end or not self._solve(count, end):
                return
            self.seconds = time.monotonic() - start

    def _solve(self, count: int, end: float) -> bool:
        """Solves one program; whether another one is worth while."""
        staged = staged_program(self.instance, self.instance.budget, sorted(self.moments))
        if len(staged.program.cost) > COLUMNS:
            return False
        seconds = (end - time.monotonic()) / 2  # the next ones have their turn
        slack = SLACK * self.instance.graph.time_ns
        start = decisions(self.instance, staged, self.found.order)
        try:
            answer = staged.program.solve(Limits(0.0, slack, NODES, seconds), start=start)
        except ProgramError:
            return False
        self.bound = max(self.bound, self.instance.graph.time_ns + safe_floor(answer))
        if answer.values:
            order = described(self.instance, staged, answer)
            self.found.consider(self.instance, order, end)
            if len(self.found.binding) <= count:
                self.moments |= set(violated(self.instance, order, self.moments)[:2])
        return True
