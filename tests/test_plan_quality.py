"""Plans never become worse unnoticed: real models' graphs with fixed costs, exact overheads.

The graphs (`tests/data`) are ResNet-50, a U-Net, Swin and eight layers of Llama, priced for a
V100. Overheads are those that the sweep of `planner.frontier` found when they were written down.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.instance import Instance
from planner.problem import Problem
from planner.sweep import sweep
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tests import compact

SHARES = (0.4, 0.6)  # of what the plain step peaks at above the fixed part

EXPECTED = {  # in percent of the step
    "llama-8": (12.87, 0.93),
    "resnet-50": (10.57, 5.33),
    "swin": (9.31, 4.09),
    "unet": (4.35, 1.79),
}


WORSE = 0.1  # percentage points that a change may cost


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_overheads(name: str) -> None:
    graph = compact.load(name)
    problem = Problem(graph, 0)
    plain = Instance(problem).peak(save_all_order(graph))
    budgets = [graph.fixed + int(share * (plain - graph.fixed)) for share in SHARES]
    found = []
    for budget, solution in zip(budgets, sweep(problem, budgets, time_limit=600), strict=True):
        price = simulate(graph, Schedule.from_order(graph, solution.order))
        assert price.peak_bytes <= budget
        assert solution.bound_ns <= price.time_ns
        found.append(100 * (price.time_ns / graph.time_ns - 1))
    assert not worse(EXPECTED[name], found), table(name, EXPECTED[name], found)


def worse(before: Sequence[float], after: Sequence[float]) -> list[int]:
    """Which of the budgets cost more than they did."""
    return [
        i for i, pair in enumerate(zip(before, after, strict=True)) if pair[1] - pair[0] > WORSE
    ]


def table(name: str, before: Sequence[float], after: Sequence[float]) -> str:
    """Overheads before and after, budget by budget."""
    lines = [f"{'graph':12} {'budget':>8} {'before':>8} {'after':>8} {'points':>8}"]
    for share, old, new in zip(SHARES, before, after, strict=True):
        lines.append(f"{name:12} {share:8.0%} {old:7.2f}% {new:7.2f}% {new - old:+8.2f}")
    return "\n".join(["overhead in percent of the step", *lines])


def test_a_worse_plan_fails_with_the_table() -> None:
    assert worse((12.87, 0.93), (12.96, 1.04)) == [1]
    lines = table("llama-8", (12.87, 0.93), (12.96, 1.04)).splitlines()
    assert lines[-1].split() == ["llama-8", "60%", "0.93%", "1.04%", "+0.11"]
