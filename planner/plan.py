"""The plan: frozen data that says what to save, what it costs, and how good it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from planner import plan_file
from planner.cuts import CutPoint, Recomputed, TimelineEntry
from planner.report_text import table
from tracer.errors import PlannerError
from tracer.graph import ComputationGraph

if TYPE_CHECKING:
    from planner.diff import PlanDiff
    from planner.engine import Engine
    from planner.frontier import Frontier
    from planner.verify import Verification


@dataclass(frozen=True)
class Plan:
    """A schedule for one training step, with its price and its proof.

    Bytes count the whole step: parameters, buffers, gradients, optimizer state, inputs, saved
    values, temporaries, workspace. Times are nanoseconds of the cost model.

    Attributes:
        budget_bytes: bytes allowed at the peak.
        peak_bytes: predicted peak; baseline_peak_bytes: of the step that recomputes nothing;
            minimum_peak_bytes: the least budget that planning is known to satisfy.
        saved_bytes: forward values alive between forward and backward (parameters, buffers and
            inputs not counted); baseline_saved_bytes: the same without recomputation.
        overhead: added step time over the step that recomputes nothing, as a fraction.
        lower_bound: no schedule within the budget has less overhead than this.
        gap: (step time - bound's step time) / bound's step time.
        status: "optimal" if no schedule is faster, by proof, for this cost model and order of
            first calls; else "feasible".
        solver: which solver found it; solve_seconds: how long that took.
        step_ns, recompute_ns: predicted time of the step, and of what runs again in it.
        optimizer_peak_bytes: peak of the optimizer's own step, which no schedule changes; 0 if no
            optimizer was named.
        cuts: saved values from which recomputation starts, the weightiest first.
        recomputed: operations that run again.
        timeline: bytes held while each operation runs.
        breakdown: what fills the peak, as (what, bytes).
        notes: what the reader should know (costs that are estimates, outputs assumed unused).
        keep, recompute: the patterns that the plan obeys.
        fingerprint: of the graph that the plan is for, its shapes included; cost_fingerprint: of
            its costs, too.
        graph: the step that was planned; order: the schedule, as indices of its operations.
        breaks: where the forward leaves a graph, as "file:line: reason"; empty if it is one graph.
        pieces: for a forward that is captured in pieces, the plan of each; `graph` is then that of
            the first, and `order` is empty.
        backend: what runs the rewritten graphs.
    """

    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    minimum_peak_bytes: int
    saved_bytes: int
    baseline_saved_bytes: int
    overhead: float
    lower_bound: float
    gap: float
    status: str
    solver: str
    solve_seconds: float
    step_ns: int
    recompute_ns: int
    device: str
    torch_version: str
    fingerprint: str
    cost_fingerprint: str
    optimizer_peak_bytes: int
    accumulate: bool
    order: tuple[int, ...]
    cuts: tuple[CutPoint, ...]
    recomputed: tuple[Recomputed, ...]
    timeline: tuple[TimelineEntry, ...]
    breakdown: tuple[tuple[str, int], ...]
    graph: ComputationGraph = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    pieces: tuple[Plan, ...] = ()
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    backend: str = "eager"
    _engine: Engine | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return table(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled as data: the link to the model that it was made for stays behind."""
        return {**self.__dict__, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells programs apart: the graph, the schedule, and the same of its pieces."""
        return self.fingerprint, self.order, self.accumulate, tuple(p.key for p in self.pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return dataclasses.replace(self, _engine=None)

    def apply(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """Makes the model train by this plan, in place; returns the same object.

        The manner is that of `nn.Module.compile()`: same class, same `state_dict`, same signature.
        `model.plan` shows the plan in force. A batch of another shape is planned when it comes,
        within the same budget. A plan that was loaded from a file needs `model`.

        Raises:
            StalePlan: at the first batch, if a loaded plan was made for another graph.
        """
        return self._need_engine(model).install(self)

    def remove(self) -> torch.nn.Module:
        """Undoes `apply`; returns the model."""
        return self._need_engine(None).uninstall()

    def verify(self, batch: Any = None) -> Verification:
        """Runs one real step with and without the plan and compares them.

        Args:
            batch: as `example_inputs` of `plan`; left out, the model's `example_input_array`.
        """
        from planner.verify import verify

        return verify(self._need_engine(None), self, batch)

    def edit(
        self,
        *,
        keep: str | Sequence[str] | None = None,
        recompute: str | Sequence[str] | None = None,
        budget_gb: float | None = None,
        time_limit: float = 60.0,
    ) -> Plan:
        """A new plan for the same step with other wishes; compare them with `diff`.

        What is left out stays as it is in this plan; an empty sequence drops the patterns. Nothing
        is traced or measured again. A plan that was read as data gives one that is data, too.

        Args:
            keep: module-path patterns, as for `planner.plan`.
            recompute: the same.
            budget_gb: another budget.
            time_limit: seconds for the solver.

        Raises:
            InfeasibleBudget: no schedule fits with these patterns.
            PlannerError: a pattern matches nothing.
        """
        from planner.edit import edit

        return edit(self, keep, recompute, budget_gb, time_limit)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to another: cut points, peak, time. `print` it."""
        from planner.diff import PlanDiff

        return PlanDiff.of(self, other)

    def check(self) -> list[str]:
        """What in the plan does not follow from its graph and schedule; empty if it holds.

        Prices the schedule again. The proof of the lower bound is not made again.
        """
        from planner.checks import differences

        return differences(self)

    def check_against(
        self,
        model: torch.nn.Module,
        example_inputs: Any = None,
        *,
        hardware: str | None = None,
        optimizer: Any = None,
    ) -> dict[str, Any]:
        """Traces a model, without running it, and checks that this plan is for it.

        Args:
            model: as for `planner.plan`.
            example_inputs: as for `planner.plan`.
            hardware: as for `planner.plan`.
            optimizer: as for `planner.plan`.

        Returns:
            `operations`, and `peak_bytes` and `step_ns` with the costs that hold here.

        Raises:
            StalePlan: the plan is for another graph, or over its budget with these costs.
        """
        from planner.checks import against

        return against(self, model, example_inputs, hardware, optimizer)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, for `load` on this or another machine."""
        write(path, plan_file.to_text(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path, model: torch.nn.Module | None = None) -> Plan:
        """Reads a plan that `save` wrote; with `model`, ready for `apply()`.

        Raises:
            PlannerError: the file is not a plan, is damaged, or is of a later version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlannerError(f"{path} cannot be read: {error}") from error
        plan = plan_file.from_text(text, str(path), cls)
        if model is None:
            return plan
        return dataclasses.replace(plan, _engine=_engine_for(plan, model))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: what a plan file holds (see `planner/plan.schema.json`)."""
        return plan_file.to_dict(self)

    def report(self, path: str | Path, *, frontier: Frontier | None = None) -> None:
        """Writes a report; the ending of the name says which.

        Args:
            path: `.html`, a page that needs nothing but a browser; `.txt`, the table with all cut
                points; `.png`, `.svg` or `.pdf`, plots (needs matplotlib).
            frontier: what `planner.frontier` returned, for the trade-off curve. Left out, the curve
                shows this plan, the step without recomputation, and lower bounds.

        Raises:
            PlannerError: another ending, no matplotlib, or the file cannot be written.
        """
        from planner.report import write_report

        write_report(self, Path(path), frontier)

    def export(self, path: str | Path, format: str | None = None) -> None:
        """Writes the timeline or the graph for other programs.

        Args:
            path: where to; without `format` the ending decides.
            format: "chrome-trace" (`.json`; opens in Perfetto), "csv", "graphml" or "dot".
        """
        from planner.export import export

        export(self, Path(path), format)

    def _repr_html_(self) -> str:
        from planner.report_page import notebook

        return notebook(self)

    def _need_engine(self, model: torch.nn.Module | None) -> Engine:
        if model is not None and (self._engine is None or self._engine.model is not model):
            return _engine_for(self, model)
        if self._engine is None:
            raise PlannerError(
                "this plan was read as data and knows no model: use plan.apply(model), or "
                "Plan.load(path, model)"
            )
        return self._engine


def _engine_for(plan: Plan, model: torch.nn.Module) -> Engine:
    from planner.engine import Engine
    from planner.request import Request, check_model

    check_model(model)
    return Engine(model, Request(plan.budget_bytes, backend=plan.backend))


def write(path: str | Path, text: str) -> None:
    """Writes a text file; an error names the file."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error}") from error
