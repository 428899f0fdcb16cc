"""Costs measured on the device at hand: each unique call is run in isolation, never the model.

Arguments are made up (`tracer.synthetic`), bytes and time are those of the real kernel
(`tracer.probe`), and known costs come from the cache on disk (`tracer.cost_cache`). The process is
left as it was: random-number state, threads, modes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tracer import cost_cache
from tracer.allocator import allocated_bytes
from tracer.costs import (
    OperationCost,
    Progress,
    input_tensors,
    output_tensors,
    signature,
    storage_bytes,
    target_name,
    tensors_in,
)
from tracer.errors import PlannerError
from tracer.hardware import available_bytes, measured_profile
from tracer.operators import waits_for_others
from tracer.probe import Probe, probe_for, settled_times_ns
from tracer.roofline import RooflineCosts, moved_bytes
from tracer.smaller import smaller_call
from tracer.synthetic import make_arguments
from tracer.torch_private import plain_eager, profiler_running, storage_key
from tracer.views import view_ns

_SHARE = 0.7  # of the free memory that a call may fill
_LONGEST_NS = 5_000_000_000  # a call that is estimated to take longer is run in a smaller size
_SMALL = 1 << 20  # bytes; calls that read and write less are timed together
_TOGETHER = 64  # calls
_VIEW = "view"  # in place of a signature: any call that only makes a view


@dataclass(frozen=True)
class _Trial:
    """A call that has run, and what it takes.

    Attributes:
        node: what is called.
        call: the same, without arguments.
        workspace: bytes beside its results.
        outputs: bytes that it keeps for each result, where they are not the nominal ones.
        read: bytes of its arguments.
        made: nominal bytes of its results.
        largest: bytes of the largest of what it allocates.
    """

    node: fx.Node
    call: Callable[[], Any]
    workspace: int
    outputs: tuple[int, ...] | None
    read: int
    made: int
    largest: int

    @property
    def nbytes(self) -> int:
        return self.read + self.made + self.workspace


class MeasuredCosts:
    """A `CostModel` that runs what it is asked about.

    A call that cannot be run on made-up arguments, does not fit into the free memory, or would take
    more than five seconds is estimated and listed in `unmeasured`. On CUDA, torch's statistics of
    peak memory start anew.

    Args:
        device: where to run; CUDA if there is one, else the CPU.
        cached: whether to read and write the cache on disk.
        seconds: about the most time spent on timing one signature (a call that takes longer is
            timed twice).
        relative_error: standard error of a time at which timing stops earlier.

    Raises:
        PlannerError: from `prepare` and `cost`, while a torch profiler records on the CPU.
        ValueError: likewise, for a device that is neither CPU nor CUDA.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        cached: bool = True,
        seconds: float = 0.3,
        relative_error: float = 0.02,
    ) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device if device is not None else default)
        self._cached = cached
        self._seconds, self._relative_error = seconds, relative_error
        self._known: dict[str, OperationCost] = {}
        self._estimated: dict[str, OperationCost] = {}
        self._unmeasured: dict[str, str] = {}
        self._loaded = False
        self._probe: Probe

    def allocated(self, nbytes: int) -> int:
        return allocated_bytes(nbytes, self.device.type)

    @property
    def unmeasured(self) -> Mapping[str, str]:
        return dict(self._unmeasured)

    @property
    def view_ns(self) -> int:
        """See `CostModel`."""
        if self._lacks_view:
            self.prepare([])
        return self._known[_VIEW].time_ns if _VIEW in self._known else 0

    @property
    def _lacks_view(self) -> bool:
        """Whether views cost something here, and nobody has measured what."""
        return self.device.type == "cpu" and _VIEW not in self._known

    def prepare(self, nodes: Sequence[fx.Node], progress: Progress | None = None) -> None:
        if self._cached and not self._loaded:
            self._known = cost_cache.load(cost_cache.environment(self.device))
            self._loaded = True
        found = {signature(n): n for n in nodes}
        have = self._known.keys() | self._estimated.keys()
        wanted = {s: n for s, n in found.items() if s not in have}
        if not wanted and not self._lacks_view:
            return
        known = len(self._known)
        try:
            self._measure_all(wanted, progress)
        finally:  # what was measured before an interrupt is not lost
            if self._cached and len(self._known) > known:
                where = cost_cache.environment(self.device)
                self._known = cost_cache.store(where, self._known)

    def adding_ns(self, call: fx.Node) -> int:
        """See `CostModel`."""
        return self.cost(call).time_ns

    def cost(self, node: fx.Node) -> OperationCost:
        key = signature(node)
        if key not in self._known and key not in self._estimated:
            self.prepare([node])
        return self._known[key] if key in self._known else self._estimated[key]

    def _measure_all(self, wanted: Mapping[str, fx.Node], progress: Progress | None) -> None:
        cuda = self.device.type == "cuda"
        if not cuda and profiler_running():
            raise PlannerError(
                "operations cannot be measured while a torch profiler records; plan before it "
                "starts (other batch sizes too, with dynamic=), or from hardware="
            )
        with plain_eager(), torch.random.fork_rng([self.device] if cuda else []):
            torch.manual_seed(0)
            self._probe = probe_for(self.device)
            try:
                if self._lacks_view:
                    self._known[_VIEW] = OperationCost(view_ns())
                self._measure_each(wanted, progress)
            finally:  # training needs the memory that the probe and torch's cache hold
                del self._probe
                if cuda:
                    torch.cuda.empty_cache()

    def _measure_each(self, wanted: Mapping[str, fx.Node], progress: Progress | None) -> None:
        waiting: dict[str, _Trial] = {}
        for done, (key, node) in enumerate(wanted.items(), start=1):
            trial = self._trial(key, node)
            if trial is not None and trial.nbytes <= _SMALL:
                waiting[key] = trial
            elif trial is not None:
                self._time({key: trial})
            if len(waiting) == _TOGETHER or done == len(wanted):
                self._time(waiting)
                waiting = {}
            if progress is not None:
                progress(done, len(wanted))

    def _trial(self, key: str, node: fx.Node) -> _Trial | None:
        """A call that can be timed; None if its cost is known without, as well as it can be."""
        if waits_for_others(node):
            self._estimated[key] = self._estimate.cost(node)
            name = target_name(node)
            self._unmeasured[name] = "estimated, since one rank alone must not call it"
            return None
        if self._too_large(node):
            self._scale(key, node)
            return None
        failures = []
        for wide_vectors in (False, True):
            try:
                return self._tried(node, wide_vectors=wide_vectors)
            except Exception as error:  # whatever a kernel may say about made-up arguments
                failures.append(error)
        self._estimate_failed(key, node, failures[0])
        return None

    def _tried(self, node: fx.Node, *, wide_vectors: bool = False) -> _Trial:
        args, kwargs = make_arguments(node, self.device, wide_vectors=wide_vectors)
        target: Any = node.target

        def call() -> Any:
            return target(*args, **kwargs)

        call()  # loads code, fills caches of kernels and libraries
        workspace, outputs = self._bytes(call, node, (args, kwargs))
        made = [storage_bytes(t) for t in output_tensors(node)]
        read = sum(map(storage_bytes, input_tensors(node)))
        return _Trial(node, call, workspace, outputs, read, sum(made), max([workspace, *made]))

    def _time(self, trials: Mapping[str, _Trial]) -> None:
        try:
            times = self._times_ns([*trials.values()])
        except Exception as error:  # the memory may have become less since they ran
            for key, trial in trials.items():
                self._estimate_failed(key, trial.node, error)
            return
        for (key, trial), time_ns in zip(trials.items(), times, strict=True):
            self._known[key] = OperationCost(time_ns, trial.workspace, trial.outputs)

    def _estimate_failed(self, key: str, node: fx.Node, error: Exception) -> None:
        self._estimated[key] = self._estimate.cost(node)
        self._unmeasured[target_name(node)] = f"estimated, since running it failed: {error}"

    def _times_ns(self, trials: Sequence[_Trial]) -> list[int]:
        if not trials:
            return []
        # Each call gives its memory back before the next one takes any.
        room = self._probe.room(
            max(t.workspace + t.made for t in trials), max(t.largest for t in trials)
        )
        times = settled_times_ns(
            self._probe,
            [t.call for t in trials],
            seconds=self._seconds,
            relative_error=self._relative_error,
        )
        del room
        return times

    def _bytes(
        self, call: Callable[[], Any], node: fx.Node, arguments: object
    ) -> tuple[int, tuple[int, ...] | None]:
        """Workspace, and the kept bytes where they are not what the fake results say."""
        result, peak = self._probe.peak_bytes(call)
        expected = node.meta.get("val")
        kept = _kept(_matched(expected, result), tensors_in(arguments))
        nominal = _kept(_matched(expected, expected), input_tensors(node))
        held = sum(map(self.allocated, kept))
        return max(0, peak - held), None if kept == nominal else kept

    def _scale(self, key: str, node: fx.Node) -> None:
        """Runs a smaller call, and scales its cost by what the roofline says of both."""
        name, estimate = target_name(node), self._estimate.cost(node)
        try:
            factor = 2
            while self._too_large(small := smaller_call(node, factor)):
                factor *= 2
            measured = self._tried(small)
            (time_ns,) = self._times_ns([measured])
        except Exception as error:  # no smaller call, or one that does not run
            self._estimated[key] = estimate
            self._unmeasured[name] = f"estimated, since it is too large to run here: {error}"
            return
        longer = estimate.time_ns / self._estimate.cost(small).time_ns
        larger = moved_bytes(node) / moved_bytes(small)
        self._estimated[key] = OperationCost(
            round(time_ns * longer), round(measured.workspace * larger)
        )
        self._unmeasured[name] = f"scaled from a call {factor} times smaller, which can be run here"

    def _too_large(self, node: fx.Node) -> bool:
        """For the free memory (inputs, and results twice), or for anybody's patience."""
        needed = sum(map(storage_bytes, input_tensors(node)))
        needed += 2 * sum(map(storage_bytes, output_tensors(node)))
        if needed > _SHARE * available_bytes(self.device):
            return True
        return self._estimate.cost(node).time_ns > _LONGEST_NS

    @cached_property
    def _estimate(self) -> RooflineCosts:
        return RooflineCosts(measured_profile(self.device))


def _matched(expected: Any, result: Any) -> list[torch.Tensor | None]:
    """For each expected tensor the one that came; kernels leave out results nobody asked for."""
    if isinstance(expected, torch.Tensor):
        return [result if isinstance(result, torch.Tensor) else None]
    if isinstance(expected, tuple | list):
        pairs = zip(expected, result, strict=True)
        return [t for e, r in pairs for t in _matched(e, r)]
    return []


def _kept(outputs: list[torch.Tensor | None], inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """Bytes that each result keeps alive: none for a storage counted before, or of an input."""
    seen = {storage_key(t) for t in inputs if t.layout is torch.strided}
    sizes = []
    for tensor in outputs:
        if tensor is None:
            sizes.append(0)
            continue
        key = storage_key(tensor) if tensor.layout is torch.strided else id(tensor)
        sizes.append(0 if key in seen else storage_bytes(tensor))
        seen.add(key)
    return tuple(sizes)
