"""What other tools do, written again on our graphs and judged by our simulator.

Each is a function from an instance to orders, which the table evaluates at their true peak: for a
budget the fastest order that fits counts. That flatters the peers, whose own estimates often miss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.blocks import Block, split
from planner.instance import Instance
from planner.linear import Program
from planner.options import Option
from planner.orders import lazy_order
from planner.solvers.chain import Prepared, table_order

BLOCK = 6  # least operations of a block
LEVELS = 1000  # of the knapsack

# Operators that torch's partitioner does not recompute by default: the compute-intensive ones.
HEAVY = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product",
    "upsample_bilinear2d",
    "_softmax",
)


def rotor(instance: Instance, budget: int) -> Iterator[list[int]]:
    """The recurrence of rotor (hal-02352969): a block saves everything inside it, or its input.

    Sizes and times as in `chain`, but no block has an option between the two.
    """
    prepared = Prepared(instance, split(instance, BLOCK), only_save_all)
    target = budget
    for _ in range(6):
        order = table_order(prepared, target)
        if order is None:
            return
        yield order
        peak = instance.peak(order)
        if peak <= budget:
            return
        target -= peak - budget


def only_save_all(options: tuple[Option, ...], block: Block) -> tuple[Option, ...]:
    """The option that runs nothing again."""
    del block
    return (min(options, key=lambda o: (o.time, o.saved)),)


def per_block(instance: Instance) -> Iterator[list[int]]:
    """One checkpoint for each block: `torch.utils.checkpoint` around every layer.

    A block runs forward again as a whole before its backward, up to the last operation that makes
    something that backward reads (torch's early stop).
    """
    order = list(range(instance.boundary))
    needed = set(instance.graph.candidates)
    for block in reversed(split(instance, BLOCK).blocks):
        useful = [i for i, o in enumerate(block.forward) if needed.intersection(instance.makes[o])]
        again = block.forward[: max(useful, default=-1) + 1]
        order += [o for o in again if instance.again[o]]
        order += block.backward
    yield order


def min_cut_knapsack(instance: Instance, steps: int = 20) -> Iterator[list[int]]:
    """torch's partitioner with `activation_memory_budget` from 1 to 0.

    The least bytes are saved (a minimum cut) such that no heavy operator runs again. Then a
    knapsack chooses which heavy operators may run again after all: the outputs kept are those of
    most time whose bytes fit in a share of the saved bytes. The cut is taken again for that choice.
    """
    heavy = [o for o in range(instance.boundary) if instance.again[o] and _is_heavy(instance, o)]
    everything = minimum_cut(instance, set(heavy))
    yield lazy_order(instance, everything)
    least = minimum_cut(instance, set())
    most_bytes, least_bytes = (_bytes(instance, s) for s in (everything, least))
    for step in range(steps - 1, -1, -1):
        room = (most_bytes - least_bytes) * step // steps
        kept = knapsack(instance, heavy, room)
        yield lazy_order(instance, minimum_cut(instance, kept))


def _is_heavy(instance: Instance, o: int) -> bool:
    name = instance.graph.operations[o].target.removeprefix("aten.").split(".")[0]
    return any(name == h or (h.startswith("_") and name.startswith(h)) for h in HEAVY)


def _bytes(instance: Instance, values: set[int]) -> int:
    return sum(instance.size[v] for v in values)


def minimum_cut(instance: Instance, once: set[int]) -> set[int]:
    """The values of least bytes from which backward can be computed, `once` not running again.

    A minimum cut with values as weighted nodes; written as its linear program, which is whole.
    """
    program = Program("cut")
    needs: dict[int, int] = {}
    saved: dict[int, int] = {}
    for o in range(instance.boundary):
        if instance.again[o] and o not in once:
            needs[o] = program.column(f"again_{o}", 1e-6)
        for v in instance.makes[o]:
            if not instance.held[v]:
                saved[v] = program.column(f"saved_{v}", instance.size[v] / 1e6)

    def ways(v: int) -> list[tuple[int, float]]:
        o = instance.producer[v]
        return [(saved[v], 1.0)] + ([(needs[o], 1.0)] if o in needs else [])

    for v in instance.graph.candidates:
        if not instance.held[v] and v in saved:
            program.row(f"needed_{v}", ways(v), lower=1.0)
    for o, column in needs.items():
        for u in instance.reads[o]:
            if u in saved:
                program.row(f"input_{o}_{u}", [*ways(u), (column, -1.0)], lower=0.0)
    values = program.solve(relaxed=True).values
    return {v for v, column in saved.items() if values[column] > 0.5}


def knapsack(instance: Instance, heavy: list[int], room: int) -> set[int]:
    """The heavy operators of most time whose outputs fit into `room` bytes."""
    unit = max(1.0, room / LEVELS)
    best = np.zeros(LEVELS + 1)
    chosen = np.zeros((len(heavy), LEVELS + 1), dtype=bool)
    weights = [int(np.ceil(sum(instance.size[v] for v in instance.makes[o]) / unit)) for o in heavy]
    for i, o in enumerate(heavy):
        w = weights[i]
        if w > LEVELS:
            continue
        with_it = np.full(LEVELS + 1, -1.0)
        with_it[w:] = best[: LEVELS + 1 - w] + instance.time[o]
        chosen[i] = with_it > best
        best = np.maximum(best, with_it)
    kept: set[int] = set()
    level = LEVELS if room else 0
    for i in range(len(heavy) - 1, -1, -1):
        if chosen[i, level]:
            kept.add(heavy[i])
            level -= weights[i]
    return kept
