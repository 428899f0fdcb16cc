"""Views of a plan that reports and exports share: its graphs, the step without recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.cuts import TimelineEntry, saved_values, timeline
from runtime.schedule import Schedule, save_all_order
from runtime.simulator import simulate
from tracer.graph import Operation

if TYPE_CHECKING:
    from planner.plan import Plan


def parts(plan: Plan) -> tuple[Plan, ...]:
    """The plans that have a graph and an order: those of the pieces, or the plan itself."""
    return plan.pieces or (plan,)


def schedule_of(part: Plan) -> Schedule:
    """The schedule as steps."""
    return Schedule.from_order(part.graph, part.order)


def plain_schedule(part: Plan) -> Schedule:
    """The schedule of the same step that recomputes nothing."""
    return Schedule.from_order(part.graph, save_all_order(part.graph))


def baseline_timeline(plan: Plan) -> tuple[TimelineEntry, ...]:
    """The timeline of the step without recomputation."""
    lines = []
    for part in parts(plan):
        schedule = plain_schedule(part)
        lines.append(timeline(part.graph, schedule, simulate(part.graph, schedule)))
    return joined(lines)


def joined(lines: Sequence[tuple[TimelineEntry, ...]]) -> tuple[TimelineEntry, ...]:
    """Timelines of pieces as that of a step: forward in order, then backward in reverse."""
    if len(lines) == 1:
        return lines[0]
    at = [next(i for i, e in enumerate(line) if e.what == "boundary") for line in lines]
    forward = [e for line, b in zip(lines, at, strict=True) for e in line[:b]]
    backward = [e for line, b in zip(lines[::-1], at[::-1], strict=True) for e in line[b + 1 :]]
    return (*forward, lines[-1][at[-1]], *backward)


def operations_by_name(plan: Plan) -> dict[str, Operation]:
    """Operations of all parts; the names are those that timelines use."""
    return {op.name: op for part in parts(plan) for op in part.graph.operations}


def saved_by_name(part: Plan) -> dict[str, int]:
    """Bytes of the values held from forward to backward, by name."""
    values = part.graph.values
    return {values[v].name: values[v].nbytes for v in saved_values(part.graph, schedule_of(part))}
