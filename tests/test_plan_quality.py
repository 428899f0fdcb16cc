"""Plans never become worse unnoticed: real models' graphs with fixed costs, exact overheads.

The graphs (`tests/data`) are ResNet-50, a U-Net, Swin and eight layers of Llama, priced for a
V100. Overheads are those that the sweep of `planner.frontier` found when they were written down.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_overheads(name: str) -> None:
    graph = compact.load(name)
    problem = Problem(graph, 0)
    plain = Instance(problem).peak(save_all_order(graph))
    budgets = [graph.fixed + int(share * (plain - graph.fixed)) for share in SHARES]
    for budget, solution, expected in zip(
        budgets, sweep(problem, budgets, time_limit=600), EXPECTED[name], strict=True
    ):
        price = simulate(graph, Schedule.from_order(graph, solution.order))
        assert price.peak_bytes <= budget
        overhead = 100 * (price.time_ns / graph.time_ns - 1)
        assert solution.bound_ns <= price.time_ns
        assert overhead <= expected + 0.1
