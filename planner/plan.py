"""The plan: frozen data that says what to save, what it costs, and how good it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from planner.cuts import CutPoint, Recomputed, TimelineEntry
from planner.report import table
from tracer.errors import PlannerError

if TYPE_CHECKING:
    from planner.engine import Engine
    from planner.verify import Verification

FORMAT = "checkpoint-planner plan"
VERSION = 1


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
        cuts: saved values from which recomputation starts.
        recomputed: operations that run again.
        timeline: bytes held while each operation runs.
        breakdown: what fills the peak, as (what, bytes).
        notes: what the reader should know (costs that are estimates, outputs assumed unused).
        fingerprint: of the graph that the plan is for; order: the schedule itself.
        breaks: where the forward leaves a graph, as "file:line: reason"; empty if it is one graph.
        pieces: for a forward that is captured in pieces, the plan of each.
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
    accumulate: bool
    order: tuple[int, ...]
    cuts: tuple[CutPoint, ...]
    recomputed: tuple[Recomputed, ...]
    timeline: tuple[TimelineEntry, ...]
    breakdown: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    pieces: tuple[Plan, ...] = ()
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

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, model: torch.nn.Module | None = None) -> Plan:
        """Reads a plan that `save` wrote; with `model`, ready for `apply()`.

        Raises:
            PlannerError: the file is not a plan, is damaged, or is of a later version.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlannerError(f"{path} cannot be read: {error}") from error
        plan = _from_text(text, str(path))
        if model is None:
            return plan
        return dataclasses.replace(plan, _engine=_engine_for(plan, model))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("_engine", "pieces")
        }
        data["pieces"] = [piece.to_dict() for piece in self.pieces]
        return {"format": FORMAT, "version": VERSION, **data}

    def report(self, path: str | Path) -> None:
        """Writes the table and the cut points to a text file."""
        Path(path).write_text(table(self, rows=None) + "\n")

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
    return Engine(model, Request(plan.budget_bytes))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(v) for k, v in dataclasses.asdict(value).items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _from_text(text: str, where: str) -> Plan:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlannerError(f"{where} is not a plan file: it is not valid JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlannerError(f"{where} is not a plan file: it does not say format = {FORMAT!r}")
    if data.get("version") != VERSION:
        raise PlannerError(
            f"{where} is a plan of version {data.get('version')!r}; this library reads version "
            f"{VERSION}. Make the plan again, or use the library that wrote it"
        )
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError) as error:
        raise PlannerError(f"{where} is a damaged plan file: {error!r}") from error


def _from_data(data: Mapping[str, Any]) -> Plan:
    fields = {f.name: data[f.name] for f in dataclasses.fields(Plan) if f.name != "_engine"}
    fields["pieces"] = tuple(_from_data(piece) for piece in fields["pieces"])
    fields["breaks"] = tuple(str(b) for b in fields["breaks"])
    fields["order"] = tuple(int(i) for i in fields["order"])
    fields["cuts"] = tuple(CutPoint(**{**c, "shape": tuple(c["shape"])}) for c in fields["cuts"])
    fields["recomputed"] = tuple(Recomputed(**r) for r in fields["recomputed"])
    fields["timeline"] = tuple(TimelineEntry(**t) for t in fields["timeline"])
    fields["breakdown"] = tuple((str(k), int(v)) for k, v in fields["breakdown"])
    fields["notes"] = tuple(str(n) for n in fields["notes"])
    for name in ("budget_bytes", "peak_bytes", "step_ns"):
        if not isinstance(fields[name], int):
            raise TypeError(f"{name} is not a whole number")
    return Plan(**fields)
