"""The examples and benchmarks run, small, as a user would run them.

`EXAMPLES=all pytest tests/test_examples.py` runs each of them; by default those that take longest
are left out: `make demo` runs the first, other tests what the others are made of.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from tests.command_process import script

ROOT = Path(__file__).resolve().parent.parent

COMMANDS = {
    "quickstart": "examples/quickstart.py",
    "linear_tanh": "examples/linear_tanh.py --narrow 64 --wide 512 --batch 64 --rounds 1",
    "bert_large": (
        "examples/bert_large.py --layers 3 --hidden 128 --sequence 128 --vocabulary 512 "
        "--budgets 50 --rounds 1"
    ),
    "what_fits": (
        "examples/what_fits.py --size tiny --sequence 32 --vocabulary 128 --budget-gb 0.03"
    ),
    "llama_lora": (
        "-m examples.llama_lora --layers 2 --width 64 --length 32 --batch 2 --vocabulary 128"
    ),
    "unet": "-m examples.unet --layers 1 --width 32 --pixels 32 --batch 2",
    "vit": "-m examples.vit --layers 2 --width 64 --pixels 32 --batch 2",
    "long_sequence": "-m examples.long_sequence --layers 2 --width 64 --length 256 --most 1024",
    "step_time": "-m benchmarks.step_time launch --rounds 1",
}

LONG = (
    () if os.environ.get("EXAMPLES") == "all" else ("quickstart", "what_fits", "unet", "step_time")
)


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in LONG])
def test_runs(name: str, tmp_path: Path) -> None:
    done = script(COMMANDS[name], tmp_path)
    assert done.code == 0, done.out + done.err


def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    shown: list[object] = []
    namespace: dict[str, object] = {"__name__": "notebook"}
    for source in code:
        tree = ast.parse(source)
        last = tree.body[-1]
        if isinstance(last, ast.Expr):  # a notebook shows the value of a last expression
            tree.body.pop()
            exec(compile(tree, "notebook", "exec"), namespace)
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), namespace))
        else:
            exec(compile(tree, "notebook", "exec"), namespace)
    assert any("<iframe" in html() for s in shown if (html := getattr(s, "_repr_html_", None)))
