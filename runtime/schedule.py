"""Schedules: the full program of a step as typed steps, built from an order of operations.

A solver decides only the *order*: the sequence of operation indices, with recomputed operations
standing again where they run again. When values can be freed follows from it: right after the last
read before the value is made again, or before the end. `Schedule.from_order` adds these steps, and
the moments at which gradients leave the backward pass (the slices).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tracer.graph import ComputationGraph, Kind, Operation


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation; its outputs are held from here on."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of a value."""

    value: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Forward has returned; the tangents arrive."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """End of a slice of the backward pass: these gradients are handed to autograd."""

    values: tuple[int, ...]


Step = Compute | Free | Boundary | Deliver


class ScheduleError(ValueError):
    """The schedule is not a valid program for the graph."""


@dataclass(frozen=True)
class Schedule:
    """Steps of one training step, in order."""

    steps: tuple[Step, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The operation indices in the order in which they run."""
        return tuple(s.op for s in self.steps if isinstance(s, Compute))

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Operations that run more than once, each as often as it runs again."""
        seen: set[int] = set()
        again: list[int] = []
        for op in self.order:
            (again.append if op in seen else seen.add)(op)
        return tuple(again)

    @classmethod
    def from_order(cls, graph: ComputationGraph, order: Sequence[int]) -> Schedule:
        """Adds boundary, frees and deliveries to an order of operations.

        Raises:
            ScheduleError: the order is not valid for the graph.
        """
        boundary = _boundary_position(graph, order)
        last_read = _last_reads(graph, order)
        leaving = deliveries(graph, order, boundary)
        steps: list[Step] = []
        held: set[int] = {v.index for v in graph.values if v.producer is None}
        runs: set[int] = set()
        for position, index in enumerate(order):
            if position == boundary:
                steps.append(Boundary())
            op = graph.operations[index]
            steps.append(Compute(index))
            touched = (*writes(op, again=index in runs), *reads(op, again=index in runs))
            held.update(writes(op, again=index in runs))
            runs.add(index)
            for v in dict.fromkeys(touched):
                if v in held and (v, position) in last_read:
                    held.discard(v)
                    steps.append(Free(v))
            if position in leaving:
                steps.append(Deliver(leaving[position]))
        if boundary == len(order):
            steps.append(Boundary())
        schedule = cls(tuple(steps))
        check(graph, schedule)
        return schedule


def reads(op: Operation, *, again: bool) -> tuple[int, ...]:
    """Values that a call reads; a call that runs again also reads its random-number state."""
    return (*op.inputs, op.state) if again and op.state is not None else op.inputs


def writes(op: Operation, *, again: bool) -> tuple[int, ...]:
    """Values that a call makes; the first call also writes its random-number state."""
    return op.outputs if again or op.state is None else (*op.outputs, op.state)


def save_all_order(graph: ComputationGraph) -> tuple[int, ...]:
    """The order that recomputes nothing."""
    return tuple(range(len(graph.operations)))


def _boundary_position(graph: ComputationGraph, order: Sequence[int]) -> int:
    """Right after the last forward operation that runs for the first time."""
    seen: set[int] = set()
    boundary = 0
    for position, index in enumerate(order):
        if index not in seen and graph.operations[index].is_forward:
            boundary = position + 1
        seen.add(index)
    return boundary


def _last_reads(graph: ComputationGraph, order: Sequence[int]) -> set[tuple[int, int]]:
    """(value, position) after which the value can be freed.

    Walks backwards: `needed` holds the values that something later reads before making them again.
    Resident values, outputs and gradients belong to others and are never freed by the schedule.
    """
    first: dict[int, int] = {}
    for position, index in enumerate(order):
        first.setdefault(index, position)
    kept = (Kind.RESIDENT, Kind.OUTPUT, Kind.GRADIENT)
    needed: set[int] = set()
    free: set[tuple[int, int]] = set()
    for position in range(len(order) - 1, -1, -1):
        op = graph.operations[order[position]]
        again = first[order[position]] < position
        made, read = writes(op, again=again), reads(op, again=again)
        for v in dict.fromkeys((*made, *read)):
            if v not in needed and graph.values[v].kind not in kept:
                free.add((v, position))
        needed.difference_update(made)
        needed.update(read)
    return free


def deliveries(
    graph: ComputationGraph, order: Sequence[int], boundary: int
) -> dict[int, tuple[int, ...]]:
    """Positions where slices end, with the gradients that leave there.

    A gradient leaves when it is complete and what it is the gradient of has been read for the last
    time: a hook may change a parameter as soon as its gradient is there.

    A slice costs an autograd node (tens of microseconds), a gradient that waits costs its bytes:
    one slice for every gradient of a megabyte or more, and at most about sixteen for small models.
    Where each slice is compiled, there are at most about eight.
    """
    size = {v.index: v.nbytes for v in graph.values if v.kind is Kind.GRADIENT}
    enough = min(1 << 20, max(1, sum(size.values()) // 16))
    if graph.few_slices:
        enough = max(1, sum(size.values()) // 8)
    complete: dict[int, list[int]] = {}
    for v, position in _last_touches(graph, order, boundary).items():
        complete.setdefault(position, []).append(v)
    result: dict[int, tuple[int, ...]] = {}
    waiting: list[int] = []
    for position in sorted(complete):
        waiting += complete[position]
        if sum(size[v] for v in waiting) >= enough:
            result[position] = tuple(waiting)
            waiting = []
    if waiting:
        result[len(order) - 1] = result.get(len(order) - 1, ()) + tuple(waiting)
    return result


def _last_touches(graph: ComputationGraph, order: Sequence[int], boundary: int) -> dict[int, int]:
    """Position of the last operation after which each gradient may leave."""
    last: dict[int, int] = {}
    for position in range(boundary, len(order)):
        for v in graph.touched[order[position]]:
            last[v] = position
    return last


def check(graph: ComputationGraph, schedule: Schedule) -> None:
    """Runs the schedule symbolically and raises `ScheduleError` at the first wrong step.

    Written apart from `from_order` and the simulator on purpose: it is the referee of both.
    """
    held = {v.index for v in graph.values if v.producer is None and v.kind is not Kind.TANGENT}
    runs = [0] * len(graph.operations)
    delivered: list[int] = []
    at_boundary = False
    for number, step in enumerate(schedule.steps):
        match step:
            case Boundary():
                if at_boundary:
                    raise ScheduleError(f"step {number}: a second boundary")
                at_boundary = True
                held |= {v.index for v in graph.values if v.kind is Kind.TANGENT}
            case Free(value):
                if value not in held:
                    raise ScheduleError(f"step {number}: {graph.values[value].name} is not held")
                held.discard(value)
            case Deliver(values):
                delivered += values
                if not held.issuperset(values):
                    raise ScheduleError(f"step {number}: delivers a gradient that is not there")
                # Whoever takes a gradient may change what it is the gradient of.
                held.difference_update(*(graph.values[v].of for v in values))
            case Compute(index):
                _check_compute(graph, index, number, held, runs, at_boundary)
    missing = [op.name for op in graph.operations if not runs[op.index]]
    if missing:
        raise ScheduleError(f"never run: {', '.join(missing[:5])}")
    if not at_boundary:
        raise ScheduleError("no boundary")
    gradients = [v.index for v in graph.values if v.kind is Kind.GRADIENT]
    if sorted(delivered) != gradients:
        raise ScheduleError("not every gradient is delivered exactly once")


def _check_compute(
    graph: ComputationGraph,
    index: int,
    number: int,
    held: set[int],
    runs: list[int],
    at_boundary: bool,
) -> None:
    op = graph.operations[index]
    again = runs[index] > 0
    if op.is_forward and not again and at_boundary:
        raise ScheduleError(f"step {number}: {op.name} runs first after the boundary")
    if not op.is_forward and not at_boundary:
        raise ScheduleError(f"step {number}: {op.name} runs before the boundary")
    if again and not op.recomputable:
        raise ScheduleError(f"step {number}: {op.name} may not run again")
    for v in reads(op, again=again):
        if v not in held:
            raise ScheduleError(
                f"step {number}: {op.name} reads {graph.values[v].name}, which is not held"
            )
    runs[index] += 1
    held.update(writes(op, again=again))
