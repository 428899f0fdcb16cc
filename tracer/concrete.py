"""Symbolic sizes: one capture for many shapes, made concrete for each.

Where Dynamo lets a size vary, the joint graph speaks of symbols. Everything after capture wants
numbers, so for each combination of sizes that occurs the graph is copied with the symbols replaced.
That costs a fraction of a second where a capture costs many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracer.errors import UntraceableModel
from tracer.torch_private import (
    FakeTensor,
    is_symbolic,
    joint_fake_mode,
    linear_in,
    number_of,
    storage_key,
    tensor_over,
    tree_map,
)

Binding = tuple[tuple[str, int], ...]
"""Sizes by the names of their symbols, sorted; empty for a graph without symbols."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)

_STALE = ("val", "aliased_input", "tensor_meta", "example_value")


@dataclass(frozen=True)
class Place:
    """Where a call says how large a symbol is: there stands scale * symbol + shift.

    Attributes:
        position: of the argument; what: "number", "size", "stride", "offset", "storage"; dim: for
            sizes and strides.
    """

    symbol: str
    position: int
    what: str
    dim: int
    scale: int
    shift: int

    def read(self, arguments: Sequence[Any]) -> int:
        found = next(n for w, d, n in _numbers(arguments[self.position]) if self._is(w, d))
        return (int(found) - self.shift) // self.scale

    def _is(self, what: str, dim: int) -> bool:
        return (self.what, self.dim) == (what, dim)


@dataclass(frozen=True)
class Symbols:
    """Where the arguments of a captured graph say how large each symbol is."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Symbols:
        """From the fake arguments of the capture; the simplest place for each symbol."""
        found: dict[str, Place] = {}
        for position, item in enumerate(inputs):
            for what, dim, number in _numbers(item):
                linear = linear_in(number)
                if linear is None:
                    continue
                name, scale, shift = linear
                place = Place(name, position, what, dim, scale, shift)
                if name not in found or (scale, shift) == (1, 0) != _form(found[name]):
                    found[name] = place
        return cls(tuple(found[name] for name in sorted(found)))

    def bind(self, arguments: Sequence[Any]) -> Binding:
        """The sizes in a real call."""
        return tuple((place.symbol, place.read(arguments)) for place in self.places)

    @staticmethod
    def size_of(size: Any) -> str | None:
        """The symbol that a size is; None for numbers and for what is reckoned from symbols."""
        linear = linear_in(size)
        return linear[0] if linear is not None and linear[1:] == (1, 0) else None


def _form(place: Place) -> tuple[int, int]:
    return place.scale, place.shift


def _numbers(item: Any) -> Iterator[tuple[str, int, Any]]:
    """The numbers that an argument brings, symbolic or not."""
    if not isinstance(item, torch.Tensor):
        yield "number", 0, item
        return
    yield from (("size", dim, size) for dim, size in enumerate(item.shape))
    if item.layout is torch.strided and type(item) in _PLAIN:
        yield from (("stride", dim, stride) for dim, stride in enumerate(item.stride()))
        yield "offset", 0, item.storage_offset()
        yield "storage", 0, item.untyped_storage().nbytes()


def concrete(module: fx.GraphModule, binding: Binding) -> fx.GraphModule:
    """A copy of a joint graph with numbers in place of symbols.

    Raises:
        UntraceableModel: a size depends on the content of a tensor.
    """
    return _Copy(module, dict(binding)).run()


class _Copy:
    def __init__(self, module: fx.GraphModule, sizes: dict[str, int]) -> None:
        self.module, self.sizes = module, sizes
        self.mode = joint_fake_mode()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.made: dict[fx.Node, Any] = {}

    def run(self) -> fx.GraphModule:
        graph = fx.Graph()
        for node in self.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and is_symbolic(value):
                self.made[node] = self._number(value, node)
                continue
            if node.op == "output":
                result = graph.output(fx.map_arg(node.args[0], self._argument))
            else:
                result = graph.node_copy(node, self._argument)
                result.args = tree_map(self._plain, result.args)
                result.kwargs = tree_map(self._plain, result.kwargs)
            # The place of a size among the arguments stays; whoever reads it gets the number.
            self.made[node] = self._number(value, node) if is_symbolic(value) else result
            result.meta = {k: v for k, v in node.meta.items() if k not in _STALE}
            if "val" in node.meta:
                result.meta["val"] = tree_map(lambda v, n=node: self._value(v, n), value)
        return fx.GraphModule(self.module, graph)

    def _argument(self, node: fx.Node) -> Any:
        return self.made[node]

    def _plain(self, item: Any) -> Any:
        return self._number(item, None) if is_symbolic(item) else item

    def _value(self, item: Any, node: fx.Node) -> Any:
        if is_symbolic(item):
            return self._number(item, node)
        if not isinstance(item, torch.Tensor) or item.layout is not torch.strided:
            return item
        sizes = [self._number(s, node) for s in item.shape]
        strides = [self._number(s, node) for s in item.stride()]
        offset = self._number(item.storage_offset(), node)
        key = storage_key(item)
        known = self.storages.get(key)
        nbytes = number_of(item.untyped_storage().nbytes(), self.sizes)
        if nbytes is None:  # an input that is part of something larger: as far as it reaches
            nbytes = item.element_size() * _extent(sizes, strides, offset)
        fake, storage = tensor_over(self.mode, item, sizes, strides, offset, nbytes, known)
        self.storages[key] = storage
        return fake

    def _number(self, item: Any, node: fx.Node | None) -> Any:
        number = number_of(item, self.sizes)
        if number is None:
            where = "" if node is None else node.meta.get("stack_trace") or node.name
            raise UntraceableModel(
                f"a size ({item}) depends on the content of a tensor, so that the memory of a step "
                f"is unknown before it runs: {where}"
            )
        return number


def _extent(sizes: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """Elements from the start of a storage to the last one of a tensor."""
    if 0 in sizes:
        return offset
    steps = ((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return offset + 1 + sum(steps)
