"""The command line: every command, for success and for bad input, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_process import Done, command

ROOT = Path(__file__).resolve().parent.parent
TRAIN = """
import torch
from torch import nn

def build():
    layers = [m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.ones(512, 32)

def other():
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.ones(64, 32)

def model():
    return build()[0]

def inputs(size):
    return torch.ones(size, 32)

def no_inputs():
    return nn.Linear(2, 2), None

def breaks():
    raise RuntimeError("no such file: data.bin")
"""
TIGHT = ("--budget-gb", "0.0006")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file of factories and two plan files."""
    made = tmp_path_factory.mktemp("commands")
    (made / "train.py").write_text(TRAIN)
    done = command("plan", "train:build", *TIGHT, "--save", "a.json", cwd=made)
    assert done.code == 0, done.err
    assert "operations run again" in done.out
    keep = ("--keep", first_recomputed(made))
    done = command("plan", "train:build", *TIGHT, *keep, "--save", "b.json", cwd=made)
    assert done.code == 0, done.err
    return made


def first_recomputed(folder: Path) -> str:
    module = json.loads((folder / "a.json").read_text())["recomputed"][0]["module"]
    assert isinstance(module, str)
    return module


def as_json(done: Done) -> Any:
    assert done.code == 0, done.err
    return json.loads(done.out)


def python_m(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """From the very start of the interpreter, as people call it."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=cwd,
        env={**variables, "CHECKPOINT_PLANNER_CACHE": str(cwd / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_from_the_start_of_the_interpreter(folder: Path) -> None:
    done = python_m("show", "a.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Checkpoint plan for cpu" in done.stdout
    done = python_m("show", "none.json", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "cannot be read" in done.stderr


def test_completion_of_the_shell(folder: Path) -> None:
    done = python_m(
        cwd=folder,
        _CHECKPOINT_PLANNER_COMPLETE="complete_bash",
        COMP_WORDS="checkpoint-planner fr",
        COMP_CWORD="1",
    )
    assert done.stdout.split() == ["frontier"], done.stderr


def test_plan(folder: Path) -> None:
    done = command(
        *("plan", "train:build", *TIGHT, "--optimizer", "SGD", "--hardware", "a100-80gb"),
        *("--save", "c.json", "--report", "c.html", "--json"),
        cwd=folder,
    )
    assert as_json(done) == json.loads((folder / "c.json").read_text())
    assert "<title>Checkpoint plan" in (folder / "c.html").read_text()
    assert "A100" in as_json(done)["device"]


def test_frontier(folder: Path) -> None:
    found = as_json(command("frontier", "train:build", "--points", "3", "--json", cwd=folder))
    overheads = [p["overhead"] for p in found["points"]]
    assert len(overheads) == 3 and overheads == sorted(overheads, reverse=True)
    done = command(
        *("frontier", "train:build", "--points", "3", "--report", "f.html", "--budget-gb", "1"),
        cwd=folder,
    )
    assert done.code == 0 and "Frontier for cpu" in done.out
    assert (folder / "f.html").exists()


def test_fit(folder: Path) -> None:
    done = command(
        *("fit", "train:model", "train:inputs", *TIGHT, "--points", "2", "--save", "fit.json"),
        *("--hardware", "v100-32gb", "--json"),
        cwd=folder,
    )
    found = as_json(done)
    assert 0 < found["largest_plain"] < found["largest"]
    shown = as_json(command("show", "fit.json", "--json", cwd=folder))
    assert [found["largest"], 32] in [v["shape"] for v in shown["graph"]["values"]]
    assert shown["peak_bytes"] <= shown["budget_bytes"] == found["budget_bytes"]


def test_show_check_and_apply_check(folder: Path) -> None:
    shown = as_json(command("show", "a.json", "--json", cwd=folder))
    assert shown == json.loads((folder / "a.json").read_text())
    assert as_json(command("check", "a.json", "--json", cwd=folder))["holds"] is True
    done = command("apply-check", "a.json", "train:build", "--run", "--json", cwd=folder)
    found = as_json(done)
    assert found["fits"] and found["bitwise"] and found["within_budget"]


def test_diff_and_edit(folder: Path) -> None:
    found = as_json(command("diff", "a.json", "b.json", "--json", cwd=folder))
    assert found["same_graph"] and not found["is_empty"]
    assert command("diff", "a.json", "a.json", "--exit-code", cwd=folder).code == 0
    done = command("diff", "a.json", "b.json", "--exit-code", cwd=folder)
    assert done.code == 5 and "step time" in done.out
    kept = first_recomputed(folder)
    done = command("edit", "a.json", "--keep", kept, "--save", "e.json", cwd=folder)
    assert done.code == 0, done.err
    edited = as_json(command("show", "e.json", "--json", cwd=folder))
    assert edited["keep"] == [kept]
    assert not any(r["module"] == kept for r in edited["recomputed"])


@pytest.mark.parametrize("name", ["r.html", "r.txt", "r.svg"])
def test_report(folder: Path, name: str) -> None:
    done = command("report", "a.json", name, "--json", cwd=folder)
    assert as_json(done) == {"wrote": name}
    assert (folder / name).stat().st_size > 500


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.graphml", "x.dot"])
def test_export(folder: Path, name: str) -> None:
    done = command("export", "a.json", name, cwd=folder)
    assert done.code == 0 and (folder / name).stat().st_size > 500


def test_costs(folder: Path) -> None:
    assert as_json(command("costs", "show", "--json", cwd=folder))["files"]
    done = command("costs", "export", "costs.json", cwd=folder)
    assert done.code == 0 and "exported" in done.out
    elsewhere = {"CHECKPOINT_PLANNER_CACHE": str(folder / "elsewhere")}
    assert as_json(command("costs", "import", "costs.json", "--json", cwd=folder, **elsewhere))[
        "costs"
    ]
    assert as_json(command("costs", "clear", "--json", cwd=folder, **elsewhere))["files"]


def test_schema(folder: Path) -> None:
    import jsonschema

    schema = as_json(command("schema", cwd=folder))
    jsonschema.validate(json.loads((folder / "a.json").read_text()), schema)


def test_doctor(folder: Path) -> None:
    found = as_json(command("doctor", "--json", cwd=folder))["findings"]
    states = {f["what"]: f["state"] for f in found}
    assert states["torch"] == states["solver"] == states["plan"] == "ok"


def test_doctor_says_what_is_wrong(folder: Path) -> None:
    locked = folder / "a file"
    locked.write_text("")
    done = command("doctor", cwd=folder, CHECKPOINT_PLANNER_CACHE=str(locked))
    assert "cannot be written" in done.out and "CHECKPOINT_PLANNER_CACHE" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing command"),
        (("plann",), 2, "No such command"),
        (("plan", "train:build"), 2, "--budget-gb"),
        (("plan", "train", *TIGHT), 1, "MODULE:FUNCTION"),
        (("plan", "train.py:build", *TIGHT), 1, "MODULE:FUNCTION"),
        (("plan", "nowhere:build", *TIGHT), 1, "cannot be imported"),
        (("plan", "train:breaks", *TIGHT), 1, "no such file: data.bin"),
        (("plan", "train:no_inputs", *TIGHT), 1, "return (model, batch)"),
        (("plan", "train:build", "--budget-gb", "-1"), 1, "budget_gb=-1"),
        (("plan", "train:build", "--budget-gb", "much"), 1, "--budget-gb much"),
        (("plan", "train:build", "--budget-gb", "1e-6"), 3, "least feasible budget"),
        (("plan", "train:build", *TIGHT, "--hardware", "abacus"), 1, "abacus"),
        (("plan", "train:build", *TIGHT, "--optimizer", "Magic"), 1, "torch.optim"),
        (("plan", "train:build", *TIGHT, "--keep", "nothing"), 1, "matches no module"),
        (("plan", "train:build", *TIGHT, "--save", "no/folder.json"), 1, "cannot be written"),
        (("frontier", "train:build", "--points", "0"), 1, "points=0"),
        (("frontier", "train:build", "--report", "f.html"), 1, "--budget-gb"),
        (("fit", "train:model", "train:nothing", *TIGHT), 1, "cannot be imported"),
        (("fit", "train:model", "train:inputs", *TIGHT, "--over", "width"), 1, "'layers'"),
        (("fit", "train:model", "train:inputs", "--budget-gb", "1e-6"), 3, "least feasible"),
        (("show", "none.json"), 1, "cannot be read"),
        (("show", "train.py"), 1, "not a plan file"),
        (("check", "tampered.json"), 1, "checksum"),
        (("check", "wrong.json"), 4, "peak_bytes is 1"),
        (("diff", "a.json", "cut.json"), 1, "cut short"),
        (("edit", "a.json", "--keep", "nothing", "--save", "e2.json"), 1, "matches no module"),
        (("apply-check", "a.json", "train:other"), 4, "another graph"),
        (("report", "a.json", "r.docx"), 1, ".html"),
        (("export", "a.json", "x.doc"), 1, "chrome-trace"),
        (("export", "a.json", "a.json"), 1, "plan file itself"),
        (("costs", "export"), 1, "needs a file"),
        (("costs", "import", "train.py"), 1, "costs import"),
        (("costs", "burn"), 2, "burn"),
        (("schema", "--yaml"), 2, "--yaml"),
        (("doctor", "who"), 2, "who"),
    ],
)
def test_bad_input_is_explained(
    folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    from planner.plan_file import checksum

    text = (folder / "a.json").read_text()
    (folder / "cut.json").write_text(text[: len(text) // 2])
    data = json.loads(text)
    data["peak_bytes"] = 1
    (folder / "tampered.json").write_text(json.dumps(data))
    (folder / "wrong.json").write_text(json.dumps({**data, "checksum": checksum(data)}))
    done = command(*arguments, cwd=folder)
    assert done.code == code, done.err
    assert message in done.err and "Traceback" not in done.err
    assert done.err.count("\n") == 1  # one line


def test_errors_as_json(folder: Path) -> None:
    done = command("show", "none.json", "--json", cwd=folder)
    error = json.loads(done.out)["error"]
    assert done.code == error["exit_code"] == 1
    assert "cannot be read" in error["message"] and error["type"] == "PlannerError"
