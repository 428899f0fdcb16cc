from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.test_costs import aten, call
from tracer import cost_cache
from tracer.cost_cache import CacheError
from tracer.costs import OperationCost, signature
from tracer.measured import MeasuredCosts

HERE = {"device": "a", "torch": "2"}
THERE = {"device": "b", "torch": "2"}
COSTS = {"x": OperationCost(1, 2, (3, 4)), "y": OperationCost(5)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cost_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_stored_is_loaded_in_the_same_environment_only():
    assert cost_cache.load(HERE) == {}
    cost_cache.store(HERE, COSTS)
    assert cost_cache.load(HERE) == COSTS
    assert cost_cache.load(THERE) == {}


def test_the_first_to_write_a_cost_decides():
    cost_cache.store(HERE, {"x": OperationCost(1)})
    merged = cost_cache.store(HERE, {"x": OperationCost(9), "z": OperationCost(7)})
    assert merged == {"x": OperationCost(1), "z": OperationCost(7)} == cost_cache.load(HERE)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"costs": {"x": [1]}}', '{"costs": {"x": [-1, 0, null]}}', "\x00\xff"],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_written_anew(folder, text):
    cost_cache.store(HERE, COSTS)
    (path,) = folder.glob("costs-*.json")
    path.write_text(text)
    with pytest.warns(UserWarning, match="damaged"):
        assert cost_cache.load(HERE) == {}
    assert cost_cache.show() == ()
    with pytest.warns(UserWarning, match="damaged"):
        cost_cache.store(HERE, COSTS)
    assert cost_cache.load(HERE) == COSTS


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cost_cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot keep costs"):
        assert cost_cache.store(HERE, COSTS) == COSTS


def test_show_and_clear(folder):
    cost_cache.store(HERE, COSTS)
    cost_cache.store(THERE, {"x": OperationCost(1)})
    cost_cache.remember("benchmark", HERE, {"rate": 1.5})
    assert sorted((f.environment["device"], f.entries) for f in cost_cache.show()) == [
        ("a", 2),
        ("b", 1),
    ]
    assert cost_cache.clear() == 3
    assert cost_cache.show() == () and cost_cache.load(HERE) == {}
    with pytest.raises(LookupError):
        cost_cache.recall("benchmark", HERE)


def test_numbers_are_remembered():
    cost_cache.remember("benchmark", HERE, {"rate": 1.5})
    assert cost_cache.recall("benchmark", HERE) == {"rate": 1.5}


def test_export_and_import(tmp_path):
    cost_cache.store(HERE, COSTS)
    cost_cache.store(THERE, {"x": OperationCost(1)})
    assert cost_cache.export_costs(tmp_path / "all.json") == 3
    cost_cache.clear()
    cost_cache.store(HERE, {"x": OperationCost(8)})
    assert cost_cache.import_costs(tmp_path / "all.json") == 3
    assert cost_cache.load(HERE) == {**COSTS, "x": OperationCost(8)}
    assert cost_cache.load(THERE) == {"x": OperationCost(1)}


@pytest.mark.parametrize("data", [{}, [{"costs": {}}], [{"environment": {}, "costs": {"x": 1}}]])
def test_what_is_no_export_is_not_imported(tmp_path, data):
    (tmp_path / "all.json").write_text(json.dumps(data or 5))
    with pytest.raises(CacheError):
        cost_cache.import_costs(tmp_path / "all.json")
    assert cost_cache.show() == ()


WRITER = """
import sys
from tracer import cost_cache
from tracer.costs import OperationCost
for n in range(20):
    cost_cache.store({"device": "a"}, {f"{sys.argv[1]}-{n}": OperationCost(n)})
"""


def test_processes_that_write_at_once_lose_nothing():
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in "ab"]
    assert [w.wait() for w in writers] == [0, 0]
    wanted = {f"{name}-{n}": OperationCost(n) for name in "ab" for n in range(20)}
    assert cost_cache.load({"device": "a"}) == wanted


def test_measured_costs_are_kept_and_found_again(monkeypatch):
    node = call(aten.exp.default, torch.rand(64))
    first = MeasuredCosts("cpu", seconds=0.0).cost(node)
    here = cost_cache.environment(torch.device("cpu"))
    kept = cost_cache.load(here)
    assert kept.pop("view").time_ns > 0
    assert kept == {signature(node): first}
    again = MeasuredCosts("cpu")
    again.prepare([node], lambda *_: pytest.fail("measured again"))
    assert again.cost(node) == first


def test_the_environment_tells_threads_and_allocators_apart(monkeypatch):
    before = cost_cache.environment(torch.device("cpu"))
    assert before["torch"] == torch.__version__ and "threads" in before
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert cost_cache.environment(torch.device("cpu")) != before


def test_the_environment_tells_how_float32_is_computed():
    usual, changed = SimpleNamespace(fp32_precision="none"), SimpleNamespace(fp32_precision="bf16")
    assert cost_cache._precision(usual, usual) == {}
    assert cost_cache._precision(changed, usual) == {"float32": "bf16/none"}
