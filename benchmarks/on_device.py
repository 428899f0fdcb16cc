"""All tables of the cost model on a CUDA device, with one command.

    python -m benchmarks.on_device

Writes `docs/fidelity-DEVICE.md` (predicted against measured peak, time and overhead for every model
of the zoo, with batches 16 times larger), adds how well the device's hardware profile predicts the
measured costs, and exports the costs that were measured, so that plans can be made elsewhere with
`checkpoint-planner costs import`. With `--device cpu` it runs the same on the CPU, for a trial.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import fx

from benchmarks import fidelity
from benchmarks.fidelity_table import table
from benchmarks.zoo import ZOO
from planner.engine import Engine
from planner.request import Inputs, Request
from tracer.cost_cache import export_costs
from tracer.costs import CostModel
from tracer.extract import likely_absent
from tracer.hardware import load_profile, profile_names
from tracer.measured import MeasuredCosts
from tracer.roofline import RooflineCosts

COPIES = {"cuda": 16, "cpu": 1}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(ZOO))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--copies", type=int, help="of each batch; 16 on CUDA")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--profile", help="hardware profile of this device, if not found by name")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; --device cpu runs the same on the CPU")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    copies = args.copies or COPIES[device.type]
    page = args.folder / f"fidelity-{slug(name)}.md"
    results = page.with_suffix(".json")
    common = ["--device", args.device, "--turns", str(args.turns), "--copies", str(copies)]
    files = ["--results", str(results), "--table", str(page)]
    fidelity.main([*args.models, *common, *files])
    profile = args.profile or profile_for(name)
    if profile:
        with page.open("a") as file:
            file.write("\n" + profile_section(args.models, args.device, copies, profile) + "\n")
    exported = args.folder / f"costs-{slug(name)}.json"
    print(f"{page} written; {export_costs(exported)} costs exported to {exported}")


def slug(name: str) -> str:
    """A device's name for a file: lower case, words joined by hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def profile_for(device_name: str) -> str | None:
    """The hardware profile of a device by the words of its name; None if there is none.

    Of several with the same words (A100 with 40 and 80 GB) the one whose memory the name says.
    """
    words = set(re.findall(r"[a-z]+\d+|\d+gb", device_name.lower().replace(" ", "-")))
    words |= set(re.findall(r"rtx-?(\d+)", device_name.lower().replace(" ", "-")))
    fitting = []
    for name in profile_names():
        card, _, memory = name.partition("-")
        if card in words or card.removeprefix("rtx") in words:
            fitting.append((memory in words, name))
    return max(fitting)[1] if fitting else None


def profile_section(models: Iterable[str], device: str, copies: int, profile: str) -> str:
    """How a profile's estimates compare with measured times, by operator, over all models."""
    measured, estimated = MeasuredCosts(device), RooflineCosts(load_profile(profile))
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name in models:
        for node in operations(name, device, copies):
            pair = (seconds(estimated, node), seconds(measured, node))
            times[str(node.target)].append(pair)
    rows = [profile_row(target, pairs) for target, pairs in sorted(times.items(), key=by_time)]
    heads = ["operator", "calls", "estimated, s", "measured, s", "median ratio", "spread"]
    title = f"## Hardware profile {profile} against measured times"
    return f"{title}\n\n{table(heads, rows)}"


def by_time(item: tuple[str, list[tuple[float, float]]]) -> float:
    return -sum(real for _, real in item[1])


def profile_row(target: str, pairs: list[tuple[float, float]]) -> list[str]:
    """Sums, the median of estimated over measured, and the typical factor around it."""
    logs = [math.log(guess / real) for guess, real in pairs]
    middle = median(logs)
    spread = math.exp(median(abs(x - middle) for x in logs))
    sums = [f"{sum(p[k] for p in pairs):.4f}" for k in (0, 1)]
    return [target, str(len(pairs)), *sums, f"{math.exp(middle):.2f}", f"{spread:.2f}"]


def seconds(costs: CostModel, node: fx.Node) -> float:
    return max(costs.cost(node).time_ns, 1) / 1e9


def operations(name: str, device: str, copies: int) -> list[fx.Node]:
    """The operations of a model's step; nothing is run."""
    step = fidelity.Step(ZOO[name], device, kept=False, copies=copies)
    engine = Engine(step.model, Request(None, device=torch.device(device)))
    inputs = Inputs((), step.batch)
    with step.autocast():
        traced = engine.trace(inputs)
    found = engine.extract(traced, inputs, likely_absent(traced.joint))
    return [node for node in found.op_nodes if node is not None]


if __name__ == "__main__":
    main()
