"""A child process of `compare`: one variant of one model, told over stdin what to do.

Each line in is the name of one of `Worker`'s actions; each line out is `MARK` and its result as
JSON. It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.variants import CHECKPOINTS, Variant, put_on
from benchmarks.zoo import entry_of
from planner import Plan
from runtime.measure import MALLOC_ENV, measure, process_peak

MARK = "compare> "
SEED = 1234


def main() -> None:
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        action: Callable[[], Any] = getattr(worker, line.strip())
        print(MARK + json.dumps(action()), flush=True)


class Worker:
    """One variant; gradients stay allocated, as under accumulation, unless an action says so."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.device, self.folder = given["device"], Path(given["folder"])
        self.variant = Variant(**given["variant"])
        self.entry = entry_of(given["model"])
        self.model, self.batch = self.entry.make(self.device)
        config: Any = getattr(self.model, "config", None)
        if self.variant.kind in CHECKPOINTS and getattr(config, "use_cache", False):
            config.use_cache = False  # as transformers does when it checkpoints
        self.call: Callable[..., Any] = self.model
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def prepare(self) -> dict[str, Any]:
        """Puts the variant on and runs the first steps: planning, tracing, compiling."""
        start = time.perf_counter()
        self.call = put_on(self.variant, self.model, self.batch, self.entry)
        self._forward_backward()
        found: dict[str, Any] = {"seconds": time.perf_counter() - start}
        self._forward_backward()  # what compiles for a second time
        plan = getattr(self.model, "plan", None)
        if isinstance(plan, Plan):
            found["plan"] = {
                "peak_bytes": plan.peak_bytes,
                "minimum_peak_bytes": plan.minimum_peak_bytes,
                "baseline_peak_bytes": plan.baseline_peak_bytes,
                "overhead": plan.overhead,
                "lower_bound": plan.lower_bound,
                "solver": plan.solver,
                "solve_seconds": plan.solve_seconds,
            }
        return found

    def step(self) -> float:
        """Seconds of one forward and backward."""
        self._wait()
        start = time.perf_counter()
        self._forward_backward()
        self._wait()
        return time.perf_counter() - start

    def peaks(self) -> dict[str, int]:
        """What a step holds at most, in bytes: by the allocator, and by the operating system."""
        found = {"allocator": self._allocator_peak()}
        if self.device == "cpu" and sys.platform == "linux":
            if all(os.environ.get(k) == v for k, v in MALLOC_ENV.items()):
                found["process"] = process_peak(self._forward_backward)
        return found

    def dropped(self) -> dict[str, int]:
        """The allocator's peak where no gradients exist before the step."""
        self._drop()
        self._forward_backward()  # what is planned or compiled for this state
        self._drop()
        return {"allocator": self._allocator_peak()}

    def gradients(self) -> dict[str, Any]:
        """Loss of a step under a fixed seed; its gradients and buffers go to a file."""
        self.model.zero_grad(set_to_none=False)
        buffers = [b.detach().clone() for b in self.model.buffers()]
        torch.manual_seed(SEED)
        loss = self._forward_backward()
        after = zip(self.model.buffers(), buffers, strict=True)
        moved = [(new.detach().double() - old.double()).cpu() for new, old in after]
        made = [p.grad.detach().cpu() for p in self.model.parameters() if p.grad is not None]
        file = self.folder / f"{time.time_ns()}.pt"
        torch.save({"gradients": made, "buffers": moved}, file)
        return {"loss": loss, "file": str(file)}

    def memory(self) -> int:
        """The most resident memory that this process had, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _forward_backward(self) -> float:
        with self.entry.autocast_on(self.device):
            output = self.call(**self.batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        return float(loss.detach())

    def _allocator_peak(self) -> int:
        return measure(self._forward_backward, self.model, None, self.batch).peak_bytes

    def _drop(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
