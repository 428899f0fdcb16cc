"""The process that solves: its answers, and that nothing waits for it for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import highs
from planner.linear import Limits, Program, ProgramError


def knapsack() -> Program:
    """Two things of three, of which the heaviest two are too heavy; the best cost is -5."""
    program = Program("knapsack")
    columns = [program.column(f"x{i}", cost) for i, cost in enumerate((-4.0, -3.0, -1.0))]
    program.row("weight", list(zip(columns, (3.0, 3.0, 2.0), strict=True)), upper=5.0)
    return program


def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that never comes back from a program, and soon ends itself."""
    source = Path(highs.__file__).read_text()
    source = source.replace("answer = solved(request)", "while True: pass")
    (tmp_path / "endless.py").write_text(source.replace("GRACE = 5.0", "GRACE = 0.2"))
    monkeypatch.setattr(highs, "__file__", str(tmp_path / "endless.py"))
    monkeypatch.setattr(highs, "CHILD", highs.Child())


def test_one_process_solves_one_program_after_the_other() -> None:
    answer = knapsack().solve()
    assert (answer.objective, answer.bound, answer.optimal) == (-5.0, -5.0, True)
    first = highs.CHILD._process
    assert knapsack().solve(relaxed=True).objective == pytest.approx(-6.0)
    assert highs.CHILD._process is first


def test_a_program_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(tmp_path, monkeypatch)
    with pytest.raises(ProgramError, match="no answer within its limits") as caught:
        knapsack().solve(Limits(seconds=0.1))
    assert not caught.value.infeasible
    monkeypatch.undo()
    assert knapsack().solve(Limits(seconds=10.0)).objective == -5.0


def test_presolve_is_left_out_after_a_program_that_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops that look at no clock are presolve's."""
    endless(tmp_path, monkeypatch)
    script = tmp_path / "endless.py"
    stuck = "if 'presolve' not in request['options']:\n                while True: pass\n"
    again = f"{stuck}            answer = solved(request)"
    script.write_text(script.read_text().replace("while True: pass", again))
    answer = knapsack().solve(Limits(seconds=1.0))
    assert (answer.objective, answer.optimal) == (-5.0, True)


def test_where_no_child_can_be_had_this_process_solves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(highs, "__file__", str(tmp_path / "broken.py"))
    monkeypatch.setattr(highs, "CHILD", highs.Child())
    assert knapsack().solve().objective == -5.0
    assert highs.CHILD._process is None
