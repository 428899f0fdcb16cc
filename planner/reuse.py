"""Plans for sizes that were not planned: a schedule for larger sizes holds for smaller ones.

Every value of a step grows with the sizes of its batch, so the same order of operations peaks no
higher when they are smaller. Nothing is measured or solved again: each operation is taken to cost
what it costs at the larger sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import fx

from runtime.schedule import Schedule
from runtime.simulator import simulate
from tracer.concrete import Binding
from tracer.costs import OperationCost
from tracer.extract import StepGraph

KEPT = 64
"""Programs that are kept, most recently used first."""

NEAR = 0.5
"""A plan serves sizes down to this part of its own; below, another one may be much faster."""

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping that forgets what was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def items(self) -> Iterable[tuple[K, V]]:
        return tuple(self._items.items())


class BorrowedCosts:
    """Costs of the same operations at larger sizes: upper bounds."""

    def __init__(self, larger: StepGraph, allocated: Callable[[int], int]) -> None:
        self._allocated = allocated
        self._costs = {
            node.name: OperationCost(
                op.time_ns,
                op.workspace,
                tuple(larger.graph.values[v].nbytes for v in op.outputs) or None,
            )
            for node, op in zip(larger.op_nodes, larger.graph.operations, strict=True)
            if node is not None
        }

    def allocated(self, nbytes: int) -> int:
        return self._allocated(nbytes)

    @property
    def unmeasured(self) -> Mapping[str, str]:
        return {}

    @property
    def view_ns(self) -> int:
        """Nothing more: the operations that read views have it in their times."""
        return 0

    def prepare(
        self, nodes: Sequence[fx.Node], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Nothing to do: all costs are there."""

    def adding_ns(self, call: fx.Node) -> int:
        """Nothing more: the operations that make gradients have it in their times."""
        del call
        return 0

    def cost(self, node: fx.Node) -> OperationCost:
        return self._costs[node.name]


def covers(larger: Binding, smaller: Binding, *, near: float) -> bool:
    """Whether no size is larger, and all together are at least a part `near` of the others."""
    big, small = 1, 1
    for (_, a), (_, b) in zip(larger, smaller, strict=True):
        if b > a:
            return False
        big, small = big * max(a, 1), small * max(b, 1)
    return small >= near * big


def peak_of(step: StepGraph, order: tuple[int, ...]) -> int:
    """Simulated peak of an order."""
    return simulate(step.graph, Schedule.from_order(step.graph, order)).peak_bytes


def nearest(candidates: Iterable[tuple[Binding, Any]]) -> Any:
    """The candidate with the least sizes, or None."""
    return min(candidates, key=lambda pair: [n for _, n in pair[0]], default=(None, None))[1]
