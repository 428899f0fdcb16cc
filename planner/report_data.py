"""What the report shows, as plain data: the page's script and the plots draw the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from planner.bounds import BOUNDARY_LIMITS, solve_boundary
from planner.cuts import TimelineEntry, saved_values
from planner.instance import Instance
from planner.linear import ProgramError
from planner.minimum import limiting
from planner.parts import baseline_timeline, operations_by_name, parts, plain_schedule, schedule_of
from planner.problem import Problem
from planner.report_text import gigabytes, milliseconds

if TYPE_CHECKING:
    from planner.frontier import Frontier
    from planner.plan import Plan

POINTS = 1500  # drawn on a line over the step
_BOUNDS = 9


class Strings:
    """Texts that occur often, each stored once."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


def report_data(plan: Plan, frontier: Frontier | None = None) -> dict[str, Any]:
    """All that the page shows. Times in ns, sizes in bytes, texts as indices of `strings`."""
    strings = Strings()
    data = {
        "summary": _summary(plan),
        "memory": memory_lines(plan, strings),
        "peak": _peak(plan),
        "curve": curve(plan, frontier),
        "cuts": _cuts(plan, strings),
        "ops": _operations(plan, strings),
    }
    return {**data, "strings": list(strings.index)}


def _summary(plan: Plan) -> dict[str, Any]:
    proof = (
        "proven optimal for the cost model and this order of operations"
        if plan.status == "optimal"
        else f"at most {plan.gap:.2%} slower than any other"
    )
    lead = (
        f"For {plan.device}, found by {plan.solver} in {plan.solve_seconds:.1f} s; {proof}. "
        f"{len(plan.recomputed)} operations run again. torch {plan.torch_version}."
    )
    base = plan.step_ns - plan.recompute_ns
    peak = f"peak, of a budget of {gigabytes(plan.budget_bytes)}"
    peaks = (plan.peak_bytes, plan.baseline_peak_bytes, plan.minimum_peak_bytes)
    saved = (plan.saved_bytes, plan.baseline_saved_bytes)
    rows = [
        [peak, *map(gigabytes, peaks)],
        ["kept from forward to backward", *map(gigabytes, saved), ""],
        ["step time", milliseconds(plan.step_ns), milliseconds(base), ""],
        ["added step time", f"{plan.overhead:.2%}", "0.00%", f"{plan.lower_bound:.2%}"],
    ]
    return {"lead": lead, "rows": rows, "notes": list(plan.notes)}


def memory_lines(plan: Plan, strings: Strings) -> dict[str, Any]:
    """Bytes held over the step: [start, bytes, name, what, module] for the plan."""
    plain = baseline_timeline(plan)
    known = operations_by_name(plan)
    lines = []
    for start, entry in thinned(plan.timeline):
        op = known.get(entry.name)
        lines.append([start, entry.bytes, entry.name, entry.what, strings(op.module if op else "")])
    end = max(sum(e.time_ns for e in line) for line in (plan.timeline, plain))
    return {
        "plan": lines,
        "plain": [[start, entry.bytes] for start, entry in thinned(plain)],
        "boundary": _boundary(plan.timeline),
        "budget": plan.budget_bytes,
        "end": max(end, 1),
        "top": max(e.bytes for e in (*plan.timeline, *plain)),
    }


def thinned(
    entries: Sequence[TimelineEntry], most: int = POINTS
) -> list[tuple[int, TimelineEntry]]:
    """(start in ns, entry); of neighbours that are too many for a line the highest one."""
    started = []
    at = 0
    for entry in entries:
        started.append((at, entry))
        at += entry.time_ns
    width = -(-len(started) // most) or 1
    groups = [started[i : i + width] for i in range(0, len(started), width)]
    return [max(group, key=lambda pair: pair[1].bytes) for group in groups]


def _boundary(entries: Sequence[TimelineEntry]) -> int:
    at = 0
    for entry in entries:
        if entry.what == "boundary":
            return at
        at += entry.time_ns
    return at


def _peak(plan: Plan) -> dict[str, Any]:
    top = max(parts(plan), key=lambda part: part.peak_bytes)
    highest = max(plan.timeline, key=lambda entry: entry.bytes)
    op = operations_by_name(plan).get(highest.name)
    if highest.bytes < plan.optimizer_peak_bytes:
        text = (
            f"The optimizer's own step holds most, {gigabytes(plan.optimizer_peak_bytes)}; no plan "
            f"changes that. Forward and backward reach {gigabytes(highest.bytes)}, "
        )
    else:
        text = f"The peak of {gigabytes(highest.bytes)} is reached "
    what = {"recompute": "when it runs again in backward"}.get(highest.what, f"in {highest.what}")
    where = f" of {op.module}" if op and op.module else ""
    text += f"at {highest.name}{where}, {what}."
    if op and op.source:
        text += f" Source: {op.source}"
    breakdown = sorted((row for row in plan.breakdown if row[1]), key=lambda row: -row[1])
    largest = limiting(top.graph, top.order, most=20)
    return {"text": text, "breakdown": breakdown, "largest": largest}


def curve(plan: Plan, frontier: Frontier | None = None) -> dict[str, Any]:
    """Points (bytes, added time) of the trade-off, and lower bounds under it."""
    if frontier is not None:
        points = [(p.peak_bytes, p.overhead) for p in frontier.points]
        bounds = [(p.budget_bytes, p.lower_bound) for p in frontier.points]
        text = (
            "Solid line: plans for other budgets. Dash-dotted line: no plan within such a budget "
            "costs less. The circle is this plan."
        )
    else:
        points = [(plan.peak_bytes, plan.overhead), (plan.baseline_peak_bytes, 0.0)]
        bounds = _bounds(plan)
        text = (
            "The circle is this plan; the line leads from it to the step without recomputation. "
            "Dash-dotted line: no plan within such a budget costs less. For the curve through "
            "other budgets, give planner.frontier(...) to the report."
        )
    table = [[gigabytes(b), _at(points, b), f"{bound:.2%}"] for b, bound in bounds]
    return {
        "points": sorted(points),
        "bounds": bounds,
        "plan": (plan.peak_bytes, plan.overhead),
        "least": plan.minimum_peak_bytes,
        "most": max(plan.baseline_peak_bytes, plan.peak_bytes),
        "rows": table,
        "text": text,
    }


def _at(points: Sequence[tuple[int, float]], budget: int) -> str:
    """Least added time of the known points within a budget."""
    return min((f"{o:.2%}" for b, o in sorted(points)[::-1] if b <= budget), default="", key=_value)


def _value(percent: str) -> float:
    return float(percent.rstrip("%"))


def _bounds(plan: Plan) -> list[tuple[int, float]]:
    """Lower bounds for budgets from the least one to that of the step without recomputation."""
    own = (plan.budget_bytes, plan.lower_bound)
    least, most = plan.minimum_peak_bytes, plan.baseline_peak_bytes
    found = {own[0]: own[1], most: 0.0} if own[0] < most else {most: 0.0}
    if not plan.pieces and plan.recomputed:
        base = max(plan.graph.time_ns, 1)
        instance = Instance(Problem(plan.graph, 0))
        for step in range(_BOUNDS - 1):
            budget = least + (most - least) * step // (_BOUNDS - 1)
            with suppress(ProgramError):
                bound = solve_boundary(instance, budget, BOUNDARY_LIMITS).bound_ns
                found[budget] = max(found.get(budget, 0.0), (bound - base) / base)
    tightest = 0.0
    result = []
    for budget in sorted(found, reverse=True):  # less memory never takes less time
        tightest = max(tightest, found[budget])
        result.append((budget, tightest))
    return result[::-1]


def _cuts(plan: Plan, strings: Strings) -> list[list[Any]]:
    total = sum(c.bytes * c.recompute_ns for c in plan.cuts) or 1
    return [
        [
            *(c.name, strings(c.module), strings(c.op), "x".join(map(str, c.shape)), c.dtype),
            *(c.bytes, c.recompute_ns, strings(c.source), c.reason),
            c.bytes * c.recompute_ns / total,
        ]
        for c in plan.cuts
    ]


def _operations(plan: Plan, strings: Strings) -> list[list[Any]]:
    """[name, target, module, source, backward?, ns, runs, kept, kept without plan, inputs].

    Inputs are pairs of the operation that makes them and their bytes, one after the other.
    """
    lines: list[list[Any]] = []
    several = len(parts(plan)) > 1
    for number, part in enumerate(parts(plan)):
        graph, first = part.graph, len(lines)
        kept, plain = (saved_values(graph, s) for s in (schedule_of(part), plain_schedule(part)))
        size = [v.nbytes for v in graph.values]
        runs = Counter(part.order)
        for op in graph.operations:
            flow = []
            for v in op.inputs:
                producer = graph.values[v].producer
                if producer is not None:
                    flow += [first + producer, size[v]]
            lines.append(
                [f"{number}: {op.name}" if several else op.name]
                + [strings(op.target), strings(op.module), strings(op.source)]
                + [int(not op.is_forward), op.time_ns, runs[op.index]]
                + [sum(size[v] for v in op.outputs if v in held) for held in (kept, plain)]
                + [flow]
            )
    return lines
