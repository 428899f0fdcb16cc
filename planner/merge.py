"""One plan for a step in pieces, from the plans of its pieces."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.parts import joined
from planner.plan import Plan

if TYPE_CHECKING:
    from planner.engine import Engine


def merged(
    plans: Sequence[Plan],
    *,
    bound_ns: int,
    floor: int,
    seconds: float,
    breaks: tuple[str, ...],
    notes: tuple[str, ...],
    engine: Engine | None,
) -> Plan:
    """The whole step: forward of all pieces in order, then backward in reverse.

    Args:
        plans: of the pieces; what the rest of the step holds beside them is in their fixed part.
        bound_ns: no plan within the budget takes less time in the pieces.
        floor: peak of the optimizer's step.
        seconds: that planning took.
        breaks: where the forward leaves the graph.
        notes: for the reader.
        engine: of the model.
    """
    first = plans[0]
    top = max(plans, key=lambda p: p.peak_bytes)
    step = sum(p.step_ns for p in plans)
    base = max(1, step - sum(p.recompute_ns for p in plans))
    bound = max(base, min(bound_ns, step))
    saved, plain_saved = (sum(getattr(p, n) for p in plans) for n in _SAVED)
    return dataclasses.replace(
        first,
        peak_bytes=max(top.peak_bytes, floor),
        baseline_peak_bytes=max(_plain_peak(plans), floor),
        minimum_peak_bytes=max(first.minimum_peak_bytes, floor),
        saved_bytes=saved,
        baseline_saved_bytes=plain_saved,
        overhead=(step - base) / base,
        lower_bound=(bound - base) / base,
        gap=(step - bound) / bound,
        status="optimal" if step <= bound else "feasible",
        solve_seconds=seconds,
        step_ns=step,
        recompute_ns=sum(p.recompute_ns for p in plans),
        fingerprint=_together([p.fingerprint for p in plans]),
        cost_fingerprint=_together([p.cost_fingerprint for p in plans]),
        optimizer_peak_bytes=floor,
        order=(),
        cuts=tuple(c for p in plans for c in p.cuts),
        recomputed=tuple(r for p in plans for r in p.recomputed),
        timeline=joined([p.timeline for p in plans]),
        breakdown=top.breakdown,
        notes=(*notes, *(f"the forward leaves the graph at {b}" for b in breaks)),
        breaks=breaks,
        pieces=tuple(plans),
        keep=engine.request.keep if engine else (),
        recompute=engine.request.recompute if engine else (),
        _engine=engine,
    )


_SAVED = ("saved_bytes", "baseline_saved_bytes")


def _plain_peak(plans: Sequence[Plan]) -> int:
    """Peak without recomputation: each piece then also runs beside what earlier ones save more."""
    peak = more = 0
    for p in plans:
        peak = max(peak, p.baseline_peak_bytes + more)
        more += p.baseline_saved_bytes - p.saved_bytes
    return peak


def _together(fingerprints: Sequence[str]) -> str:
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:32]
