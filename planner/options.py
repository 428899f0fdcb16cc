"""Options of a block: ways to save and recompute inside it, each with its time and memory.

A block with its stretch of backward is a small step of its own: what comes from outside is
resident, the gradient that comes in is a tangent, what goes out stays held. The boundary program,
solved for a range of budgets, gives the saved sets worth having (Rockmate's options, Zhao et al.
2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from planner.blocks import Block
from planner.bounds import solve_boundary
from planner.instance import Instance
from planner.linear import Limits, ProgramError
from planner.orders import lazy_order
from planner.problem import Problem
from planner.search import repair_order
from tracer.graph import ComputationGraph, Kind, Operation, Phase, Value

_BUDGETS = 12  # saved sets asked for
_PEAKS = (0.85, 0.7, 0.55)  # of the lazy order's backward peak, tried for each saved set


@dataclass(frozen=True)
class Option:
    """One way to run a block forward and backward.

    Attributes:
        time: of what runs again; saved: bytes held from its forward to its backward, its target and
            what is held anyway left out.
        forward_peak, backward_peak: bytes held while it runs, its source left out.
        tail: after the forward operations: positions in `forward + backward`, in order.
    """

    time: int
    saved: int
    forward_peak: int
    backward_peak: int
    tail: tuple[int, ...]

    def dominates(self, other: Option) -> bool:
        return (
            self.time <= other.time
            and self.saved <= other.saved
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
        )


def block_options(instance: Instance, block: Block, outside: Collection[int]) -> tuple[Option, ...]:
    """The options of a block that no other one dominates, fastest first.

    `outside` are values counted elsewhere (persistent ones): they cost nothing here.
    """
    graph, target = _block_graph(instance, block, outside)
    small = Instance(Problem(graph, 0))
    read = {v for o in range(small.boundary, small.count) for v in small.reads[o]}
    gone = 0 if target < 0 or target in read else small.size[target]
    found: list[Option] = []
    for order in _orders(small):
        option = _price(small, order, gone)
        if not any(o.dominates(option) for o in found):
            found = [o for o in found if not option.dominates(o)] + [option]
    return tuple(sorted(found, key=lambda o: (o.time, o.saved)))


def _orders(small: Instance) -> Iterable[list[int]]:
    everything = [v for v in small.graph.candidates if not small.held[v]]
    base = sum(small.size[v] for v in small.tangents)
    base += _always(small)
    full = sum(small.size[v] for v in everything)
    saved_sets = {frozenset(everything), frozenset[int]()}
    for step in range(_BUDGETS):
        budget = base + full * step // _BUDGETS
        try:
            saved_sets.add(solve_boundary(small, budget, Limits(1e-3, nodes=200)).saved)
        except ProgramError:
            continue  # nothing fits at the boundary of this budget
    for saved in sorted(saved_sets, key=sorted):
        order = lazy_order(small, saved)
        yield order
        peak = small.peak(order)
        for share in _PEAKS:
            lower = repair_order(small, order, int(peak * share), most=40)
            if lower is not None:
                yield lower


def _price(small: Instance, order: Sequence[int], gone: int) -> Option:
    """The option of an order; `gone`: bytes of the target if backward does not need it."""
    profile = small.profile(order)
    forward = profile[: small.boundary]
    change, _ = small.changes(order)
    after = sum(change[: small.boundary])
    always = _always(small)
    return Option(
        small.time_of(order) - small.graph.time_ns,
        after - always,
        max(forward, default=0),
        max(profile[small.boundary :], default=gone) - gone,
        tuple(order[small.boundary :]),
    )


def _always(small: Instance) -> int:
    """Bytes of forward values that are held to the end whatever the option."""
    made = (v for o in range(small.boundary) for v in small.makes[o])
    return sum(small.size[v] for v in made if small.held[v])


def _block_graph(
    instance: Instance, block: Block, outside: Collection[int]
) -> tuple[ComputationGraph, int]:
    """(the block's graph, the index of its target in it or -1)."""
    ops = (*block.forward, *block.backward)
    inside = set(ops)
    index: dict[int, int] = {}
    values: list[Value] = []
    position = {o: i for i, o in enumerate(ops)}
    graph = instance.graph
    for o in ops:
        op = graph.operations[o]
        state = () if op.state is None else (op.state,)
        for v in (*instance.reads[o], *op.outputs, *state):
            if v not in index:
                index[v] = len(values)
                producer = position.get(instance.producer[v])
                kind = _kind(instance, block, v, inside)
                size = 0 if v in outside else instance.size[v]
                values.append(Value(index[v], str(index[v]), size, kind, producer))
    operations = tuple(
        Operation(
            i,
            str(i),
            "",
            Phase.FORWARD if i < len(block.forward) else Phase.BACKWARD,
            tuple(dict.fromkeys(index[v] for v in instance.reads[o])),
            tuple(index[v] for v in graph.operations[o].outputs),
            instance.time[o],
            instance.workspace[o],
            instance.again[o],
            None if graph.operations[o].state is None else index[instance.state[o]],
        )
        for i, o in enumerate(ops)
    )
    small = ComputationGraph(operations, tuple(values), (), graph.accumulate)
    return small, index.get(block.target, -1)


def _kind(instance: Instance, block: Block, v: int, inside: set[int]) -> Kind:
    producer = instance.producer[v]
    kind = instance.graph.values[v].kind
    if producer not in inside:
        comes_late = producer >= instance.boundary or kind is Kind.TANGENT
        return Kind.TANGENT if comes_late else Kind.RESIDENT
    if kind in (Kind.OUTPUT, Kind.STATE, Kind.GRADIENT):
        return kind
    leaves = any(c not in inside for c in instance.consumers[v])
    if producer >= instance.boundary:
        return Kind.OUTPUT if leaves else Kind.TEMPORARY
    return Kind.OUTPUT if v == block.target or leaves else Kind.ACTIVATION
