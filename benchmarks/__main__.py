"""`python -m benchmarks compare|plan|device|fidelity ...`: the benchmarks by name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

COMMANDS = {
    "compare": "benchmarks.compare.driver",
    "plan": "benchmarks.plan_table",
    "device": "benchmarks.on_device",
    "fidelity": "benchmarks.fidelity",
    "monotone": "benchmarks.monotone",
    "step-time": "benchmarks.step_time",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        lines = [
            f"  {command:10} {summary(module)}" for command, module in sorted(COMMANDS.items())
        ]
        raise SystemExit("usage: python -m benchmarks COMMAND ...\n\n" + "\n".join(lines))
    importlib.import_module(COMMANDS[name]).main(sys.argv[2:])


def summary(module: str) -> str:
    """The first line of what a benchmark says of itself; its libraries need not be installed."""
    found = importlib.util.find_spec(module)
    source = Path(found.origin).read_text() if found and found.origin else ""
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


if __name__ == "__main__":
    main()
