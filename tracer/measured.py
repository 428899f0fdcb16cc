"""Costs measured on the device at hand: each unique call is run once in isolation, never the model.

Arguments are made up (`tracer.synthetic`), bytes and time are those of the real kernel
(`tracer.probe`). The process is left as it was: random-number state, threads, grad mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

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
from tracer.probe import Probe, probe_for, settled_time_ns
from tracer.synthetic import make_arguments
from tracer.torch_private import plain_eager, storage_key


class MeasuredCosts:
    """A `CostModel` that runs what it is asked about.

    Args:
        device: where to run; CUDA if there is one, else the CPU.
        seconds: about the most time spent on timing one signature (a call that takes longer is
            timed twice).
        relative_error: standard error of a time at which timing stops earlier.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        seconds: float = 0.3,
        relative_error: float = 0.02,
    ) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device if device is not None else default)
        self._seconds, self._relative_error = seconds, relative_error
        self._known: dict[str, OperationCost] = {}
        self._unmeasured: dict[str, str] = {}
        self._probe: Probe | None = None

    @property
    def unmeasured(self) -> Mapping[str, str]:
        return dict(self._unmeasured)

    def prepare(self, nodes: Sequence[fx.Node], progress: Progress | None = None) -> None:
        wanted = {s: n for n in nodes if (s := signature(n)) not in self._known}
        if not wanted:
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), plain_eager():
            torch.manual_seed(0)
            for done, (key, node) in enumerate(wanted.items(), start=1):
                self._known[key] = self._measure(node)
                if progress is not None:
                    progress(done, len(wanted))

    def cost(self, node: fx.Node) -> OperationCost:
        key = signature(node)
        if key not in self._known:
            self.prepare([node])
        return self._known[key]

    def _measure(self, node: fx.Node) -> OperationCost:
        try:
            return self._run(node)
        except Exception as error:  # whatever a kernel may say about made-up arguments
            self._unmeasured[target_name(node)] = f"{type(error).__name__}: {error}"
            return OperationCost(_traffic_ns(node))

    def _run(self, node: fx.Node) -> OperationCost:
        if self._probe is None:
            self._probe = probe_for(self.device)
        args, kwargs = make_arguments(node, self.device)
        target: Any = node.target

        def call() -> Any:
            return target(*args, **kwargs)

        call()  # loads code, fills caches of kernels and libraries
        workspace, outputs = _bytes(self._probe, call, node, (args, kwargs))
        time_ns = settled_time_ns(
            self._probe, call, seconds=self._seconds, relative_error=self._relative_error
        )
        return OperationCost(time_ns, workspace, outputs)


def _bytes(
    probe: Probe, call: Callable[[], Any], node: fx.Node, arguments: object
) -> tuple[int, tuple[int, ...] | None]:
    result, peak = probe.peak_bytes(call)
    kept = _kept(tensors_in(result), tensors_in(arguments))
    nominal = _kept(output_tensors(node), input_tensors(node))
    return max(0, peak - sum(kept)), None if kept == nominal else kept


def _kept(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """Bytes that each result keeps alive: none for a storage counted before, or of an input."""
    seen = {storage_key(t) for t in inputs if t.layout is torch.strided}
    sizes = []
    for tensor in outputs:
        key = storage_key(tensor) if tensor.layout is torch.strided else id(tensor)
        sizes.append(0 if key in seen else storage_bytes(tensor))
        seen.add(key)
    return tuple(sizes)


def _traffic_ns(node: fx.Node) -> int:
    return max(1, sum(map(storage_bytes, (*input_tensors(node), *output_tensors(node)))) // 10)
