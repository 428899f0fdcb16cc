"""Plan files: read elsewhere, damaged, edited, compared; exports and text reports."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner import InfeasibleBudget, Plan, PlannerError
from planner.plan_file import checksum, schema
from planner.report_text import grouped
from tests.models import Perceptron
from tests.test_report_page import HOSTILE, layered, planned
from tracer.errors import StalePlan

X = torch.ones(512, 32)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron(32, 8)


@pytest.fixture(scope="module")
def made(model: nn.Module) -> Plan:
    ample = planner.plan(model, X, budget_gb=1)
    low, high = ample.minimum_peak_bytes, ample.peak_bytes
    found = planner.plan(model, X, budget_gb=(low + 0.3 * (high - low)) / 1e9)
    assert found.recomputed and found.cuts
    return found


def reloaded(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.json")
    return Plan.load(folder / "plan.json")


def test_what_is_written_is_read(made: Plan, tmp_path: Path) -> None:
    back = reloaded(made, tmp_path)
    assert back == made and str(back) == str(made)
    assert back.graph.fingerprint() == made.graph.fingerprint() == made.cost_fingerprint
    assert back.to_dict() == made.to_dict()


def test_files_follow_the_published_schema(made: Plan) -> None:
    published = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(published)
    data = made.to_dict()
    jsonschema.validate(data, published)
    assert set(published["properties"]) == set(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "peak_bytes": "much"}, published)


def test_a_file_from_another_machine() -> None:
    """Written once by another process, its source paths made relative; stays readable."""
    path = Path(__file__).parent / "data" / "plan-1.json"
    loaded = Plan.load(path)
    assert loaded.check() == []
    assert loaded.device == "NVIDIA A100 SXM4 80 GB" and loaded.recomputed


def damaged(data: dict[str, Any], **changes: Any) -> str:
    """As someone would write it who wants it to look whole."""
    data = {**data, **changes}
    return json.dumps({**data, "checksum": checksum(data)})


def test_damaged_files_are_refused(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = made.to_dict()
    text = json.dumps(data)
    order = list(data["order"])
    for content, message in [
        ("", "cut short"),
        (text[:-20], "cut short"),
        ("[" * 100_000, "cut short"),
        ("[]", "not a plan file"),
        (text.replace('"version": 1', '"version": 2'), "version 2"),
        (text.replace(f'"peak_bytes": {made.peak_bytes}', '"peak_bytes": 5'), "checksum"),
        (damaged(data, version=99), "version 99"),
        (damaged(data, peak_bytes="x"), "peak_bytes is 'x'"),
        (damaged(data, accumulate=1), "accumulate"),
        (damaged(data, cuts=7), "damaged"),
        (damaged(data, cuts=[{"name": "x"}]), "damaged"),
        (damaged(data, order=order[1:]), "schedule"),
        (damaged(data, order=[*order, 10**6]), "damaged"),
        (damaged(data, fingerprint="0" * 32), "fingerprint"),
        (damaged(data, graph={**data["graph"], "operations": [1]}), "damaged"),
    ]:
        path.write_text(content)
        with pytest.raises(PlannerError, match=message) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["peak_bytes", "step_ns", "saved_bytes", "baseline_peak_bytes"])
def test_check_derives_the_figures_again(made: Plan, field: str) -> None:
    assert made.check() == []
    wrong = dataclasses.replace(made, **{field: getattr(made, field) - 1})
    assert any(field in words for words in wrong.check())


def test_check_finds_other_claims(made: Plan) -> None:
    assert dataclasses.replace(made, cuts=made.cuts[1:]).check() == ["cuts differs"]
    assert dataclasses.replace(made, lower_bound=made.overhead + 0.1).check()
    over = dataclasses.replace(made, budget_bytes=made.peak_bytes - 1)
    assert any("over the budget" in words for words in over.check())


def test_check_against_a_model(made: Plan, model: nn.Module, tmp_path: Path) -> None:
    back = reloaded(made, tmp_path)
    found = back.check_against(model, X)
    assert found["operations"] == len(made.graph.operations)
    with pytest.raises(StalePlan, match="another graph"):
        back.check_against(model, X[:7])
    with pytest.raises(StalePlan, match="over its budget"):
        dataclasses.replace(back, budget_bytes=1).check_against(model, X)


def test_edit_keeps_and_says_the_price(made: Plan, model: nn.Module, tmp_path: Path) -> None:
    module = made.recomputed[0].module
    edited = made.edit(keep=module)
    assert edited.keep == (module,) and not any(r.module == module for r in edited.recomputed)
    assert edited.peak_bytes <= edited.budget_bytes == made.budget_bytes
    found = made.diff(edited)
    assert found.same_graph and not found.is_empty
    assert any(r.module == module for r in found.less_again)
    assert "step time" in str(found)
    assert made.edit(keep=[]).keep == () and edited.edit(budget_gb=1).keep == (module,)
    as_data = reloaded(made, tmp_path).edit(keep=module)
    assert as_data.order == edited.order
    with pytest.raises(PlannerError, match="keep='nowhere'"):
        made.edit(keep="nowhere")
    with pytest.raises(InfeasibleBudget):
        made.edit(budget_gb=1e-6)


def test_an_edited_plan_runs(made: Plan, model: nn.Module) -> None:
    edited = made.edit(recompute=made.cuts[0].module)
    verified = edited.verify(X)
    assert verified.bitwise and verified.within_budget


def test_diff_of_a_plan_with_itself(made: Plan) -> None:
    found = made.diff(made)
    assert found.is_empty and "do the same" in str(found)
    ample = made.edit(budget_gb=1)
    more, less = ample.diff(made), made.diff(ample)
    assert more.cuts_added == made.cuts and not more.cuts_removed
    assert {r.name for r in less.less_again} == {r.name for r in made.recomputed}
    assert sum(r.time_ns for r in more.more_again) == made.recompute_ns
    assert json.dumps(more.to_dict())


def test_chrome_trace(made: Plan, tmp_path: Path) -> None:
    made.export(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["name"] for e in runs] == [t.name for t in made.timeline if t.what != "boundary"]
    assert sum(e["dur"] for e in runs) * 1e3 == pytest.approx(made.step_ns)
    assert runs[-1]["ts"] + runs[-1]["dur"] == pytest.approx(made.step_ns / 1e3)
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(counters) == made.peak_bytes
    plain = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(plain) == made.baseline_peak_bytes


def test_csv(made: Plan, tmp_path: Path) -> None:
    made.export(tmp_path / "timeline.csv")
    with (tmp_path / "timeline.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(made.timeline)
    assert max(int(r["bytes"]) for r in rows) == made.peak_bytes
    assert sum(r["what"] == "recompute" for r in rows) == sum(r.times for r in made.recomputed)


def test_graphs(made: Plan, tmp_path: Path) -> None:
    made.export(tmp_path / "graph.graphml")
    graph = nx.read_graphml(tmp_path / "graph.graphml")
    assert nx.is_directed_acyclic_graph(graph)
    assert len(graph) == len(made.graph.operations)
    assert graph.number_of_edges() == made.graph.dag.number_of_edges()
    assert sum(d["runs"] > 1 for _, d in graph.nodes(data=True)) == len(made.recomputed)
    assert sum(d["saved_bytes"] for _, d in graph.nodes(data=True)) == made.saved_bytes
    made.export(tmp_path / "graph", format="dot")
    lines = (tmp_path / "graph").read_text().splitlines()
    assert sum("->" in line for line in lines) == graph.number_of_edges()


def test_hostile_names_in_exports(tmp_path: Path) -> None:
    name = HOSTILE + '\x00"] } digraph\n'
    bad = planned(layered(2, 2, name), device=name)
    bad.export(tmp_path / "g.graphml")
    ElementTree.parse(tmp_path / "g.graphml")
    bad.export(tmp_path / "g.dot")
    lines = (tmp_path / "g.dot").read_text().splitlines()
    assert lines[-1] == "}" and all(line.endswith(("];", ";", "{", "}")) for line in lines)
    bad.export(tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        assert len({len(row) for row in csv.reader(file)}) == 1
    bad.report(tmp_path / "p.svg")
    ElementTree.parse(tmp_path / "p.svg")
    assert "[bold]" not in str(planned(layered(2, 2, "[bold]x[/bold]"))).replace("[bold]x", "")


def test_plots(made: Plan, tmp_path: Path) -> None:
    made.report(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    from planner.report_plot import figure

    memory, trade, modules = figure(made).axes
    highest = max(float(np.max(np.asarray(line.get_ydata()))) for line in memory.lines)
    assert highest == made.baseline_peak_bytes / 1e9
    assert trade.lines and modules.patches


def test_names_of_reports_and_exports(made: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"\.html"):
        made.report(tmp_path / "plan.docx")
    with pytest.raises(PlannerError, match="chrome-trace"):
        made.export(tmp_path / "plan.txt")
    with pytest.raises(PlannerError, match="cannot be written"):
        made.report(tmp_path / "missing" / "plan.html")
    made.report(tmp_path / "plan.txt")
    assert str(len(made.recomputed)) in (tmp_path / "plan.txt").read_text()


def test_what_weighs_most_comes_first(made: Plan) -> None:
    choices = [c for c in made.cuts if c.reason.startswith("keeping it avoids")]
    weights = [c.bytes * c.recompute_ns for c in choices]
    assert weights == sorted(weights, reverse=True)
    assert made.cuts[: len(choices)] == tuple(choices)


def test_like_cut_points_stand_in_one_row() -> None:
    bad = planned(layered(6, 2), 3)
    groups = grouped(bad.cuts)
    assert sum(len(group) for _, group in groups) == len(bad.cuts) > len(groups)
    assert any("[" in module for module, _ in groups)
