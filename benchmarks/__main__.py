"""`python -m benchmarks compare|plan|device|fidelity ...`: the benchmarks by name."""

from __future__ import annotations

import importlib
import sys

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
    """The first line of what a benchmark says of itself."""
    return (importlib.import_module(module).__doc__ or "").split("\n")[0]


if __name__ == "__main__":
    main()
