"""The benchmark that compares with other tools: bounded, survives what its variants do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import plan_page
from benchmarks.compare import output
from benchmarks.compare.child import Child, Failed
from benchmarks.compare.driver import difference
from benchmarks.compare.variants import EAGER, Segment, Variant, alternatives
from benchmarks.zoo import LARGER, ZOO, entry_of

MODEL = "lstm"
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def test_an_unknown_variant_is_reported(tmp_path: Path) -> None:
    with (
        Child(MODEL, Variant("none", "nonsense"), "cpu", str(tmp_path), {}, 60) as child,
        pytest.raises(Failed, match="KeyError: 'nonsense'"),
    ):
        child.do("prepare")


def test_a_model_without_blocks_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    with (
        Child(MODEL, alternatives([], [])[0], "cpu", str(tmp_path), {}, 60) as child,
        pytest.raises(Failed, match="no blocks"),
    ):
        child.do("prepare")
    with Child(MODEL, EAGER, "cpu", str(tmp_path), {}, 60) as child:
        assert child.do("prepare")["seconds"] > 0
        peak = child.do("peaks")["allocator"]
        assert peak > child.do("dropped")["allocator"] > 0
        made = torch.load(child.do("gradients")["file"])
    found = difference(made, made)
    assert found == {"gradients": 0.0, "bitwise": True, "buffers_wrong": 0}
    made_otherwise = {**made, "gradients": [2 * g for g in made["gradients"]]}
    assert difference(made_otherwise, made)["gradients"] == pytest.approx(1.0)


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with Child(MODEL, EAGER, "cpu", str(tmp_path), {}, 0.2) as child:
        with pytest.raises(Failed, match=r"no answer in 0\.2 s"):
            child.do("prepare")
        with pytest.raises(Failed):
            child.do("step")


def test_one_that_the_system_kills_is_reported(tmp_path: Path) -> None:
    with Child(MODEL, EAGER, "cpu", str(tmp_path), {}, 60) as child:
        child.end()
        with pytest.raises(Failed, match="memory runs out"):
            child.do("prepare")


def row(name: str, peak: int, seconds: float, **more: object) -> output.Row:
    ratio = seconds / 1.0
    prepared = {"prepare": {"seconds": 1.0}, "kind": "ours" if "ours" in name else "checkpoint"}
    return {"name": name, "peak": {"allocator": peak}, "seconds": seconds, "ratio": ratio} | {
        **prepared,
        **more,
    }


def test_the_page_marks_what_is_not_beaten() -> None:
    other = row("x", 100, 1.3)
    assert output.beaten(other, row("ours at the peak of x", 100, 1.32))
    assert not output.beaten(other, row("ours at the peak of x", 100, 1.34))
    assert not output.beaten(other, row("ours at the peak of x", 101, 1.0))
    failed = {"name": "ours at the peak of x", "kind": "ours", "options": {}, "failed": "why"}
    assert not output.beaten(other, failed)
    result = {
        "model": "m",
        "title": "M",
        "command": "c",
        "rounds": 1,
        "environment": {},
        "variants": [{**other, "gradients": 0.5}, failed],
    }
    page = output.page(result)
    assert "| **x** |" in page and "why" in page and "**wrong: 50.0%**" in page


def test_segments_run_their_layers() -> None:
    layers = [torch.nn.Linear(3, 3) for _ in range(2)]
    x = torch.randn(2, 3, requires_grad=True)
    assert torch.equal(Segment(layers)(x), layers[1](layers[0](x)))
    assert Segment(layers).in_features == 3


def test_names_are_unique() -> None:
    assert not ZOO.keys() & LARGER.keys()
    assert entry_of("bert-12").blocks == ("BertLayer",)
    names = [v.name for v in alternatives([0.5, 0.0], ["aot", "inductor"])]
    assert len(names) == len(set(names)) == 8


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*-c*.json")), ids=lambda f: f.stem)
def test_the_committed_pages_are_those_of_the_committed_results(file: Path) -> None:
    assert file.with_suffix(".md").read_text() == output.page(json.loads(file.read_text()))


def test_the_committed_index_is_that_of_the_committed_results() -> None:
    assert (RESULTS / "index.md").read_text() == output.index(RESULTS)


def test_the_readme_shows_the_committed_results() -> None:
    text = (RESULTS.parent.parent / "README.md").read_text()
    assert text == output.readme(RESULTS, text)


def test_the_committed_solver_table_is_that_of_the_committed_results() -> None:
    file = RESULTS.parent / "solvers" / "measured.json"
    assert file.with_suffix(".md").read_text() == plan_page.page(json.loads(file.read_text()))
