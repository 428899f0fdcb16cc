"""What changes from one plan to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.cuts import CutPoint, Recomputed
from planner.report_text import gigabytes, milliseconds, rendered

if TYPE_CHECKING:
    from planner.plan import Plan

FIGURES = (
    ("budget", "budget_bytes"),
    ("peak", "peak_bytes"),
    ("saved from forward to backward", "saved_bytes"),
    ("step time", "step_ns"),
    ("recomputation", "recompute_ns"),
)


@dataclass(frozen=True)
class PlanDiff:
    """The change from one plan to another.

    Operations and values are matched by name, module and operator. Between plans of one graph that
    is exact; between plans of different graphs it is a help for the reader.

    Attributes:
        same_graph, same_costs: whether both plans are for one graph, and priced alike.
        before, after: figures of the plans: bytes and ns, by attribute of `Plan`.
        cuts_added, cuts_removed: cut points of only the second, only the first plan.
        more_again, less_again: operations that run again more often, or less often, than before,
            with the difference in runs, time and bytes.
    """

    same_graph: bool
    same_costs: bool
    before: dict[str, int]
    after: dict[str, int]
    cuts_added: tuple[CutPoint, ...]
    cuts_removed: tuple[CutPoint, ...]
    more_again: tuple[Recomputed, ...]
    less_again: tuple[Recomputed, ...]

    @classmethod
    def of(cls, first: Plan, second: Plan) -> PlanDiff:
        return cls(
            first.fingerprint == second.fingerprint,
            first.cost_fingerprint == second.cost_fingerprint,
            {name: getattr(first, name) for _, name in FIGURES},
            {name: getattr(second, name) for _, name in FIGURES},
            _only_in(second.cuts, first.cuts),
            _only_in(first.cuts, second.cuts),
            _more(second.recomputed, first.recomputed),
            _more(first.recomputed, second.recomputed),
        )

    @property
    def is_empty(self) -> bool:
        """Whether both plans run the same operations again, from the same cuts, at one price."""
        lists = (self.cuts_added, self.cuts_removed, self.more_again, self.less_again)
        return self.same_graph and self.before == self.after and not any(lists)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "is_empty": self.is_empty}

    def __str__(self) -> str:
        return rendered(self._parts())

    def _parts(self, rows: int = 12) -> Iterable[RenderableType]:
        if not self.same_graph:
            yield Text("The plans are for different graphs (model, shapes, dtypes or torch).")
        elif not self.same_costs:
            yield Text("One graph, different costs: times and workspaces are not comparable.")
        if self.is_empty:
            yield Text("The plans do the same, for the same price.")
            return
        yield self._figures()
        for title, cuts in (
            ("Cut points that are new", self.cuts_added),
            ("Cut points that are gone", self.cuts_removed),
        ):
            if cuts:
                total = sum(c.bytes for c in cuts)
                yield Text(f"{title}: {len(cuts)}, {gigabytes(total)}")
                yield _rows(((c.name, c.module, c.bytes, c.recompute_ns) for c in cuts), rows)
        for title, again in (
            ("Runs again, or more often", self.more_again),
            ("Runs again no more, or less often", self.less_again),
        ):
            if again:
                total = sum(r.time_ns for r in again)
                yield Text(f"{title}: {len(again)}, {milliseconds(total)}")
                yield _rows(((r.name, r.module, r.bytes, r.time_ns) for r in again), rows)

    def _figures(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for label, name in FIGURES:
            one, other = self.before[name], self.after[name]
            show = milliseconds if name.endswith("_ns") else gigabytes
            sign = "+" if other > one else "-" if other < one else ""
            compared = self.same_graph and one and other != one
            share = f" ({(other - one) / one:+.1%})" if compared else ""
            table.add_row(label, show(one), show(other), f"{sign}{show(abs(other - one))}{share}")
        return table


def _only_in(cuts: tuple[CutPoint, ...], others: tuple[CutPoint, ...]) -> tuple[CutPoint, ...]:
    known = {(c.name, c.module, c.op) for c in others}
    return tuple(c for c in cuts if (c.name, c.module, c.op) not in known)


def _more(ours: tuple[Recomputed, ...], theirs: tuple[Recomputed, ...]) -> tuple[Recomputed, ...]:
    """What runs again more often in the first than in the second, the longest first."""
    before: Counter[tuple[str, str, str]] = Counter()
    for r in theirs:
        before[r.name, r.module, r.op] += r.times
    found = []
    for r in ours:
        extra = r.times - before[r.name, r.module, r.op]
        if extra > 0:
            time_ns = r.time_ns * extra // r.times
            found.append(Recomputed(r.name, r.module, r.op, r.source, extra, time_ns, r.bytes))
    return tuple(sorted(found, key=lambda r: -r.time_ns))


def _rows(items: Iterable[tuple[str, str, int, int]], most: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "module"):
        table.add_column(name, overflow="fold")
    for name in ("MB", "ms"):
        table.add_column(name, justify="right")
    rows = list(items)
    for name, module, nbytes, time_ns in rows[:most]:
        table.add_row(Text(name), Text(module), f"{nbytes / 1e6:.2f}", f"{time_ns / 1e6:.3f}")
    if len(rows) > most:
        table.add_row(f"and {len(rows) - most} more")
    return table
