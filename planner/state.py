"""What a trial run of a model changes, to be put back.

Buffers, gradients, the content of inputs, random-number states and modules' Python attributes.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from runtime.torch_private import version_of
from tracer.torch_private import hooks_of


class ModelState:
    """Buffers, gradients, random-number states and attributes of a model, and its inputs' content.

    Random numbers are those of torch (CPU and the model's CUDA devices), of Python, of numpy, and
    of generators that the model's modules hold as attributes. Attributes are put back where they
    are plain data: numbers, strings, None, tensors, and containers of these. New ones are taken
    away again, unless the run has also put on hooks or made parts of the model: those stay, and a
    new attribute may be the note that this is done.
    """

    def __init__(self, model: torch.nn.Module, inputs: Iterable[torch.Tensor] = ()) -> None:
        self.model = model
        self.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        self.gradients = {n: p.grad for n, p in model.named_parameters()}
        self._hooks = hooks_of(model)
        self._made = self._hooks(), _parts(model)
        self._put_back = [*_generators(model), *_contents(inputs)]
        self._attributes = _attributes(model)

    def restore(self, *, gradients: bool = False) -> None:
        """Puts all but gradients back; gradients too, or else sets them to None."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.gradients[name] if gradients else None
        for put_back in self._put_back:
            put_back()
        set_up = (self._hooks(), _parts(self.model)) != self._made
        for attributes in self._attributes:
            attributes.put_back(set_up=set_up)


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


def _parts(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of modules, parameters and buffers."""
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    return tuple(name for each in named for name, _ in each)


class _Attributes:
    """A module's own attributes that are plain data, and what stands in their containers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.own = vars(module)
        self.names = frozenset(self.own)
        self.plain = {n: v for n, v in self.own.items() if not _torchs(n) and _is_plain(v)}
        self.contents = list(_contents(self.plain.values()))

    def put_back(self, *, set_up: bool) -> None:
        """`set_up`: the run has done more to the model, which new attributes may tell of."""
        for name in () if set_up else self.own.keys() - self.names:
            if not _torchs(name) and _is_plain(self.own[name]):
                del self.own[name]
        self.own.update(self.plain)
        for put_back in self.contents:
            put_back()


def _attributes(model: torch.nn.Module) -> list[_Attributes]:
    """Those of all modules but torch's own.

    Of these, such as wrap others keep attributes in step with state that is not seen here, and lazy
    ones are other modules after their first forward.
    """
    modules = (m for m in model.modules() if type(m).__module__.partition(".")[0] != "torch")
    return [_Attributes(module) for module in modules]


def _contents(values: Iterable[Any]) -> Iterator[Callable[[], Any]]:
    """Calls that put back what is in tensors and containers, those in containers too."""
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            if not value.is_meta:
                yield _later(_rewrite, value, value.detach().clone(), version_of(value))
        elif type(value) in _MAPPINGS:
            yield _later(_refill, value, value.update, dict(value))
            yield from _contents(value.values())
        elif type(value) in _SEQUENCES:
            yield _later(_refill, value, value.extend, list(value))
            yield from _contents(value)
        elif type(value) is set:
            yield _later(_refill, value, value.update, set(value))
        elif isinstance(value, tuple):
            yield from _contents(value)


def _rewrite(tensor: torch.Tensor, content: torch.Tensor, version: int) -> None:
    if version_of(tensor) != version:
        with torch.no_grad():
            tensor.detach().copy_(content)


def _refill(container: Any, fill: Callable[[Any], None], content: Any) -> None:
    container.clear()
    fill(content)


def _torchs(name: str) -> bool:
    """Whether an attribute is one that any module has: parameters, hooks, what is compiled."""
    return name in _MODULES_OWN or hasattr(torch.nn.Module, name)


_MODULES_OWN = frozenset(vars(torch.nn.Module()))


# Exactly these: a container of a class of its own may be frozen, or do more when it is filled.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


def _is_plain(value: Any) -> bool:
    if type(value) in _MAPPINGS:
        return all(map(_is_plain, value.values()))
    if type(value) in _SEQUENCES or isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _ATOMS) or type(value) is set


_ATOMS = (int, float, complex, str, torch.Tensor)


def _later(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)
