"""What views cost: no memory, and on a CPU a call each.

A call that only makes a view takes a few microseconds, and more between kernels that leave little
of the dispatcher's code and data near the core; a step of a transformer makes hundreds.
Where the host runs ahead of the device nobody waits for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from tracer.operators import aliased_input
from tracer.probe import Call, CpuProbe, settled_times_ns

_SWEPT = 4 << 20  # bytes; above second-level caches of today, as what a kernel moves mostly is


def view_ns() -> int:
    """Time of a typical call on the CPU that makes a view, between kernels of some megabytes."""
    probe = CpuProbe(swept=_SWEPT)
    calls = _calls()

    def row() -> None:
        for call in calls:
            call()

    (time_ns,) = settled_times_ns(probe, [row], seconds=0.3, relative_error=0.02)
    return round(time_ns / len(calls))


def views_behind(nodes: Iterable[fx.Node], made: set[fx.Node]) -> int:
    """Number of views that are made when these nodes are read, less those in `made`.

    They are added to `made`: the graphs that run a step make each view once, at its first reader.
    """
    found = 0
    pending = list(nodes)
    while pending:
        source = pending.pop()
        if source.op != "call_function" or source in made:
            continue
        if source.target is operator.getitem:  # an element of several results: no call
            pending += source.all_input_nodes
        elif (below := aliased_input(source)) is not None:
            made.add(source)
            pending.append(below)
            found += 1
    return found


def _calls() -> list[Call]:
    """The views that models are made of, as they are called when a step runs."""
    tensor = torch.zeros(2, 3, 4, 5, device="cpu")
    matrix = torch.zeros(4, 5, device="cpu")
    return [
        lambda: tensor.view([6, 20]),
        lambda: torch.permute(tensor, [0, 2, 1, 3]),
        lambda: torch.t(matrix),
        lambda: tensor.expand([2, 3, 4, 5]),
        lambda: torch.ops.aten.slice.Tensor(tensor, 1, 0, 2),
    ]
