"""Runs the core tests on several releases of torch, each in an environment of its own.

Run with `python -m benchmarks.torch_versions`; prints a table for `docs/torch_versions.md`. An
environment is made once and kept. Where the package index has only CUDA builds an environment takes
about 6 GB; `--index-url https://download.pytorch.org/whl/cpu` gives smaller ones.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11", "2.12", "2.13", "2.14")
CORE = (
    "test_training",
    "test_pieces",
    "test_meta_graphs",
    "test_errors",
    "test_residents",
    "test_measure",
    "test_simulator",
    "test_distributed",
    "test_trainers",
    "test_surroundings",
    "test_border",
    "test_aliases",
)
# torch of an environment decides about these itself.
_FOLLOWS_TORCH = ("torch", "setuptools")
_NEEDED = (
    "accelerate",
    "diffusers",
    "highspy",
    "hypothesis",
    "lightning",
    "networkx",
    "numpy",
    "platformdirs",
    "PuLP",
    "pytest",
    "pytest-xdist",
    "rich",
    "transformers",
)


@dataclass(frozen=True)
class Result:
    torch: str
    tests: int
    failed: int
    skipped: int
    names: tuple[str, ...]

    @property
    def row(self) -> str:
        passed = self.tests - self.failed - self.skipped
        return f"| {self.torch} | {passed} | {self.failed} | {self.skipped} |"


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def prepare(version: str, environments: Path, index_url: str | None) -> Path:
    """The interpreter of an environment with this release of torch."""
    environment = environments / f"torch-{version}"
    if not (environment / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(python_of(environment)), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        index = ["--index-url", index_url] if index_url else []
        subprocess.run([*pip, *index, f"torch=={version}.*"], check=True)
        constraints = environment / "constraints.txt"
        constraints.write_text(_constraints())
        subprocess.run([*pip, "--constraint", str(constraints), *_NEEDED], check=True)
        (environment / ".ready").touch()
    return python_of(environment)


def _constraints() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(n for n in lines if n.split("==")[0] not in _FOLLOWS_TORCH)


def run(python: Path, tests: list[str], workers: int) -> Result:
    """Runs the tests; returns what pytest counted."""
    report = python.parent.parent / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [
            *(str(python), "-m", "pytest", "--quiet", f"--junitxml={report}"),
            *(f"--numprocesses={workers}", "--color=no"),
            *(f"tests/{name}.py" for name in tests),
        ],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    code = "import torch; print(torch.__version__)"
    version = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return _counted(version.stdout.strip(), report)


def _counted(torch_version: str, report: Path) -> Result:
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    cases = [
        c
        for c in suite.iter("testcase")
        if c.find("failure") is not None or c.find("error") is not None
    ]
    names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in cases)
    count = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    return Result(
        torch_version,
        count["tests"],
        count["failures"] + count["errors"],
        count["skipped"],
        names,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 2.14")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venvs")
    parser.add_argument("--index-url", help="where pip takes torch from")
    parser.add_argument("--tests", nargs="*", default=None, help="names of test files")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for version in options.versions:
        if not re.fullmatch(r"\d+\.\d+", version):
            parser.error(f"{version!r} is not a release of torch such as 2.14")
    tests = options.tests or [n for n in CORE if (ROOT / "tests" / f"{n}.py").exists()]
    results = []
    for version in options.versions:
        python = prepare(version, options.environments.resolve(), options.index_url)
        results.append(run(python, tests, options.workers))
    print("\n| torch | passed | failed | skipped |\n| --- | ---: | ---: | ---: |")
    for result in results:
        print(result.row)
        for name in result.names:
            print(f"  failed: {name}", file=sys.stderr)
    return 1 if any(r.failed or not r.tests for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
