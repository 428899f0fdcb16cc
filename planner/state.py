"""What a trial run of a model changes, to be put back: buffers, gradients, inputs, random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from runtime.torch_private import version_of


class ModelState:
    """Buffers, gradients and random-number states around a model, and its inputs' content.

    Random numbers are those of torch (CPU and the model's CUDA devices), of Python, of numpy, and
    of generators that the model's modules hold as attributes.
    """

    def __init__(self, model: torch.nn.Module, inputs: Iterable[torch.Tensor] = ()) -> None:
        self.model = model
        self.inputs = [(t, t.detach().clone(), version_of(t)) for t in inputs if not t.is_meta]
        self.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        self.gradients = {n: p.grad for n, p in model.named_parameters()}
        self._put_back = list(_generators(model))

    def restore(self, *, gradients: bool = False) -> None:
        """Puts buffers and random numbers back; gradients too, or else sets them to None."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
            for tensor, content, version in self.inputs:
                if version_of(tensor) != version:
                    tensor.detach().copy_(content)
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.gradients[name] if gradients else None
        for put_back in self._put_back:
            put_back()


def _generators(model: torch.nn.Module) -> Iterator[Callable[[], Any]]:
    """Calls that put each generator into the state that it has now."""
    yield _later(torch.set_rng_state, torch.get_rng_state())
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        yield _later(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
    yield _later(random.setstate, random.getstate())
    yield _later(np.random.set_state, np.random.get_state())
    for module in model.modules():
        for own in vars(module).values():
            if isinstance(own, torch.Generator):
                yield _later(own.set_state, own.get_state())
            elif isinstance(own, random.Random):
                yield _later(own.setstate, own.getstate())
            elif isinstance(own, np.random.Generator):
                yield _later(setattr, own.bit_generator, "state", own.bit_generator.state)


def _later(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)
