"""Ours beside what people would use instead: peak, time, gradients, in one run.

    python -m benchmarks compare --model bert-12 --device cpu

Every variant runs in a process of its own. First each is looked at: its peaks (by the allocator,
and by the operating system over the process's base), its gradients and buffers against eager's
under the same seed. Then ours is planned for the peak that each of the others reached, and below.
Then they are timed in turns, ours beside the one whose peak it was given. A variant that crashes,
runs out of memory or takes too long is reported as such. Results go to a folder as JSON, as a
Markdown table and as the curve of time against peak.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import output
from benchmarks.compare.child import Child, Failed
from benchmarks.compare.variants import BACKENDS, EAGER, Variant, alternatives
from benchmarks.fidelity import environment
from benchmarks.process import ROOT, STEADY
from benchmarks.zoo import entry_of
from runtime.measure import MALLOC_ENV
from tracer.hardware import available_bytes

Row = dict[str, Any]
ROTOR_AT = ("checkpoint per block", "checkpoint in sqrt(n) segments")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", nargs="+", required=True, help="names of benchmarks.zoo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--fractions", nargs="*", type=float, default=[0.75, 0.5, 0.25, 0.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each action")
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        for model in args.model:
            entry_of(model)  # an unknown name is an error before anything runs
    except LookupError as error:
        raise SystemExit(f"--model: {error}") from error
    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            result = Comparison(model, folder, args).run()
        base = args.folder / f"{model}-{args.device}"
        base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        output.write(base, result)
        (args.folder / "index.md").write_text(output.index(args.folder))
        if args.folder.resolve() == ROOT / "docs/benchmarks":
            page = ROOT / "README.md"
            page.write_text(output.readme(args.folder, page.read_text()))
        print(base.with_suffix(".md").read_text())


def command(model: str, args: argparse.Namespace) -> str:
    """What to type to make this result again."""
    fractions = " ".join(f"{f:g}" for f in args.fractions)
    return (
        f"python -m benchmarks compare --model {model} --device {args.device} --backends "
        f"{' '.join(args.backends)} --fractions {fractions} --rounds {args.rounds}"
    )


class Comparison:
    """One model: looks at every variant, then times them."""

    def __init__(self, model: str, folder: str, args: argparse.Namespace) -> None:
        self.model, self.folder, self.args = model, folder, args
        self.rows: dict[str, Row] = {}
        self.wanted: Path | None = None  # gradients and buffers of eager

    def run(self) -> Row:
        others = alternatives(self.args.fractions, self.args.backends)
        self.look(EAGER)
        if "failed" in self.rows[EAGER.name]:  # there is nothing to compare with
            raise SystemExit(f"{self.model}: plain training {self.rows[EAGER.name]['failed']}")
        for variant in others:
            self.look(variant)
        pairs = self.ours(others)
        for variant in itertools.chain.from_iterable(pairs):
            if variant.name not in self.rows:
                self.look(variant)
        self.time([[v for v in pair if "failed" not in self.rows[v.name]] for pair in pairs])
        return {
            "model": self.model,
            "title": entry_of(self.model).title,
            "command": command(self.model, self.args),
            "rounds": self.args.rounds,
            "caches_kept": True,  # older results are of decoders without key-value caches
            "environment": environment(self.args.device),
            "variants": list(self.rows.values()),
        }

    def look(self, variant: Variant) -> None:
        """Peaks and gradients of a variant; or why there are none."""
        row: Row = {"name": variant.name, "kind": variant.kind, "options": dict(variant.options)}
        self.rows[variant.name] = row
        inductor = variant.kind == "compile" and variant.options["backend"] == "inductor"
        try:
            with self.child(variant, MALLOC_ENV) as child:
                row["prepare"] = child.do("prepare")
                row["peak"] = child.do("peaks")
                if not inductor:
                    row |= self.against_eager(child.do("gradients"))
                row["dropped"] = child.do("dropped")
                row["resident"] = child.do("memory")
            if inductor:  # it draws other random numbers, unless told otherwise
                same = replace(variant, options={**variant.options, "fallback_random": True})
                with self.child(same, MALLOC_ENV) as child:
                    child.do("prepare")
                    row |= self.against_eager(child.do("gradients"))
        except Failed as failure:
            row["failed"] = str(failure)
        print(output.line(row), file=sys.stderr, flush=True)

    def against_eager(self, made: Row) -> Row:
        """How far gradients and buffers are from eager's."""
        file = Path(made["file"])
        if self.wanted is None:  # this is eager, the first
            self.wanted = file
        found = {"loss": made["loss"], **difference(torch.load(file), torch.load(self.wanted))}
        if file != self.wanted:
            file.unlink()
        return found

    def ours(self, others: Sequence[Variant]) -> list[list[Variant]]:
        """Each of the others with ours at its peak, lowered alike; then ours alone elsewhere."""
        pairs: list[list[Variant]] = []
        for other in others:
            row = self.rows[other.name]
            if "failed" in row:
                pairs.append([other])
                continue
            options: Row = {"budget_bytes": row["peak"]["allocator"]}
            if other.options.get("backend") == "inductor":
                options["backend"] = "inductor"
            pair = [other, Variant(f"ours at the peak of {other.name}", "ours", options)]
            if other.name in ROTOR_AT:
                pair.append(Variant(f"rotor at the peak of {other.name}", "rotor", options))
            pairs.append(pair)
        ample = Variant("ours, nothing recomputed", "ours", {"budget_bytes": 10**15})
        self.look(ample)
        pairs.append([ample])
        block = self.rows["checkpoint per block"]
        if "failed" not in block:
            budget = int(1.25 * block["peak"]["allocator"])
            name = "ours at 1.25 times the peak of checkpoint per block"
            pairs.append([Variant(name, "ours", {"budget_bytes": budget})])
        if "failed" not in self.rows[ample.name]:
            # A little more: workspaces, and so the least peak, depend on the setting of malloc.
            least = int(1.001 * self.rows[ample.name]["prepare"]["plan"]["minimum_peak_bytes"])
            pairs.append([Variant("ours, the least peak", "ours", {"budget_bytes": least})])
        return pairs

    def time(self, pairs: Sequence[Sequence[Variant]]) -> None:
        """Times the variants beside eager, as many processes at once as fit."""
        room = 0.6 * available_bytes(torch.device(self.args.device))
        room -= self.rows[EAGER.name]["resident"]
        group: list[Variant] = []
        used = 0.0
        for pair in pairs:
            needs = sum(1.2 * self.rows[v.name]["resident"] for v in pair)
            if group and used + needs > room:
                self.time_group(group)
                group, used = [], 0.0
            group += pair
            used += needs
        if group:
            self.time_group(group)

    def time_group(self, variants: Sequence[Variant]) -> None:
        """Seconds of each variant, in turns with eager."""
        samples: dict[str, list[float]] = {}
        with contextlib.ExitStack() as stack:
            children: dict[str, Child] = {}
            for variant in [EAGER, *variants]:
                child = stack.enter_context(self.child(variant, STEADY))
                with self.noted(variant):
                    child.do("prepare")
                    child.do("step")
                    children[variant.name] = child
            for _ in range(self.args.rounds):
                for name, child in list(children.items()):
                    try:
                        samples.setdefault(name, []).append(child.do("step"))
                    except Failed as failure:
                        self.rows[name]["failed"] = str(failure)
                        del children[name]
        if EAGER.name not in samples:  # it ran before: too many processes for the memory
            return
        eager = statistics.median(samples[EAGER.name])
        for name in samples:
            seconds = statistics.median(samples[name])
            self.rows[name] |= {"seconds": seconds, "eager_seconds": eager}
            self.rows[name] |= {"samples": samples[name], "ratio": seconds / eager}
            print(f"{name}: {seconds:.3f} s, {seconds / eager:.3f}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def noted(self, variant: Variant) -> Iterator[None]:
        try:
            yield
        except Failed as failure:
            self.rows[variant.name]["failed"] = str(failure)

    def child(self, variant: Variant, env: Any) -> Child:
        timeout = self.args.timeout
        return Child(self.model, variant, self.args.device, self.folder, env, timeout)


def difference(mine: Row, theirs: Row) -> Row:
    """Relative L2 distance of the gradients, whether they are the same bits; buffers likewise."""
    gradients, wanted = mine["gradients"], theirs["gradients"]
    both = list(zip(gradients, wanted, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in both)
    size = sum(float(b.double().square().sum()) for b in wanted)
    buffers = zip(mine["buffers"], theirs["buffers"], strict=True)
    return {
        "gradients": (off / size) ** 0.5 if size else off**0.5,
        "bitwise": all(torch.equal(a, b) for a, b in both),
        "buffers_wrong": sum(not torch.allclose(a, b, rtol=1e-3) for a, b in buffers),
    }


if __name__ == "__main__":
    main()
