"""Bytes really held at each step of a schedule, to be compared with what the simulator says.

The rewritten graphs are copied with a mark before each operation. On CPU the marks stand among the
profiler's memory events; on CUDA each mark reads the allocator's statistics, which are kept on the
host and need no waiting.
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd.profiler import record_function

from runtime.measure import held_storages, profiled, running_bytes
from runtime.rewrite import SCHEDULE_STEP, Rewritten, Slice, graph_of
from tracer.allocator import allocated_bytes

_MARK = "checkpoint-planner step "
_passed: list[tuple[int, int]] = []  # on CUDA: (step, most bytes held since the mark before)


def marked(rewritten: Rewritten) -> Rewritten:
    """The same graphs, with a mark before each operation."""
    return dataclasses.replace(
        rewritten,
        forward=_marked_graph(graph_of(rewritten.forward)),
        slices=marked_slices(rewritten.slices),
    )


def marked_slices(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """The same slices, with a mark before each operation."""
    return tuple(
        dataclasses.replace(s, function=_marked_graph(graph_of(s.function))) for s in slices
    )


def held_at_marks(
    step: Callable[[], object], model: torch.nn.Module, inputs: object
) -> dict[int, int]:
    """Calls a step whose graphs are marked.

    Returns:
        For each step of the schedule that was marked the most bytes held from its mark to the
        next one, what `model` and `inputs` hold included; for -1, before the first.
    """
    device, storages = held_storages((model, inputs))
    if device.type == "cuda":
        return _held_on_cuda(step, storages, device)
    base = sum(s.nbytes() for s in storages)
    profiler, _ = profiled(step, storages)
    marks = _marks(profiler)
    times = [at for at, _ in marks]
    held: dict[int, int] = {}
    before = 0  # what was held when the mark was passed counts, too
    for time_ns, current in running_bytes(profiler):
        number = _step_at(marks, bisect_right(times, time_ns))
        held[number] = max(held.get(number, base + before), base + current)
        before = current
    return held


def _step_at(marks: list[tuple[int, int]], passed: int) -> int:
    return marks[passed - 1][1] if passed else -1


def _marks(profiler: Any) -> list[tuple[int, int]]:
    """(time, step) of each mark that was passed."""
    found = []
    events = profiler.kineto_results.experimental_event_tree()
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name.startswith(_MARK):
            found.append((event.start_time_ns, int(event.name.removeprefix(_MARK))))
    return sorted(found)


def _held_on_cuda(
    step: Callable[[], object], storages: list[torch.UntypedStorage], device: torch.device
) -> dict[int, int]:
    base = sum(allocated_bytes(s.nbytes(), "cuda") for s in storages)
    storages.clear()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _passed.clear()
    step()
    _note(-2)
    passed, held, number = list(_passed), dict[int, int](), -1
    _passed.clear()
    for following, most in passed:
        held[number] = max(held.get(number, 0), base + most - before)
        number = following
    return held


def _marked_graph(module: fx.GraphModule) -> fx.GraphModule:
    graph = copy.deepcopy(module.graph)
    for node in list[fx.Node](graph.nodes):
        if SCHEDULE_STEP in node.meta:
            with graph.inserting_before(node):
                graph.call_function(_mark, (node.meta[SCHEDULE_STEP],))
    made = fx.GraphModule(module, graph)
    made.graph.lint()
    return made


def _mark(number: int) -> None:
    if torch.cuda.is_initialized():
        _note(number)
    with record_function(f"{_MARK}{number}"):
        pass


def _note(number: int) -> None:
    _passed.append((number, torch.cuda.max_memory_allocated()))
    torch.cuda.reset_peak_memory_stats()
