"""What one operation costs: the interface that measured and estimated costs share.

Blocks of a model repeat, so costs are asked for by *signature*: two nodes with the same operator
and the same shapes, strides, dtypes and plain arguments cost the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from tracer.torch_private import HigherOrderOperator, OpOverload

Progress = Callable[[int, int], None]
"""Called with (signatures done, signatures in all)."""


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Cost of one call of an operator.

    Attributes:
        time_ns: time of the call.
        workspace: most bytes allocated while it runs beyond its inputs and what it keeps.
        outputs: bytes really kept for each result tensor, in order; None where all of them keep
            what their fake tensors' storages say.
    """

    time_ns: int
    workspace: int = 0
    outputs: tuple[int, ...] | None = None


class CostModel(Protocol):
    """Something that knows what operations cost."""

    def allocated(self, nbytes: int) -> int:
        """Bytes that the device's allocator counts for a request of so many.

        `OperationCost.outputs` are requests, `workspace` is what the allocator counts.
        """
        ...

    @property
    def unmeasured(self) -> Mapping[str, str]:
        """Operators whose cost is only estimated, with the reason. Never silently free."""
        ...

    @property
    def view_ns(self) -> int:
        """What one call takes that only makes a view: nothing where the host runs ahead."""
        ...

    def prepare(self, nodes: Sequence[fx.Node], progress: Progress | None = None) -> None:
        """Finds the cost of each signature among the nodes, so that `cost` is a look-up."""
        ...

    def cost(self, node: fx.Node) -> OperationCost:
        """The cost of one node (op "call_function", with fake tensors in `meta["val"]`)."""
        ...

    def adding_ns(self, call: fx.Node) -> int:
        """The time of a call of `tracer.accumulation`, which adds a gradient."""
        ...


def signature(node: fx.Node) -> str:
    """Canonical text (JSON) of everything that a call's cost depends on.

    Equal for the same call in each of several identical blocks, in every process. Holds the target,
    for each tensor argument dtype, shape, strides, and device where it is not that of the call, and
    all other arguments by value. An argument that stands twice is written as a reference: reading
    one tensor twice is not reading two.
    """
    writer = _Writer(main_device(node))
    arguments = [writer.write(a) for a in node.args]
    keywords = {name: writer.write(a) for name, a in sorted(node.kwargs.items())}
    return json.dumps([target_name(node), arguments, keywords], separators=(",", ":"))


def target_name(node: fx.Node) -> str:
    """Name of the operator that a node calls, such as "aten.mm.default"."""
    return node.target if isinstance(node.target, str) else _callable_name(node.target)


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """The tensors in a nest of tuples, lists and mappings, in order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        thing = thing.values()
    elif not isinstance(thing, tuple | list):
        return []
    return [t for item in thing for t in tensors_in(item)]


def input_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a call reads, each once."""
    return [t for source in node.all_input_nodes for t in tensors_in(source.meta.get("val"))]


def output_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a call gives, in order."""
    return tensors_in(node.meta.get("val"))


def main_device(node: fx.Node) -> torch.device:
    """The device a call runs on: that of its results, else of its inputs, else the CPU."""
    for tensor in (*output_tensors(node), *input_tensors(node)):
        return tensor.device
    return torch.device("cpu")


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage behind a tensor; of sparse and other tensors, of their elements."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return int(tensor.untyped_storage().nbytes())


def subgraph(node: fx.Node) -> torch.nn.Module | torch.Tensor:
    """What a "get_attr" node stands for: an argument graph of a higher-order operator, or a tensor.

    Raises:
        LookupError: the node belongs to no module.
    """
    owner: Any = node.graph.owning_module
    if owner is None:
        raise LookupError(f"{node.name}: the graph belongs to no module")
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, torch.nn.Module | torch.Tensor)
    return owner


class _Writer:
    """Turns arguments into plain data."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._seen: dict[fx.Node, int] = {}

    def write(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._node(argument)
        if isinstance(argument, tuple | list):
            return [self.write(a) for a in argument]
        if isinstance(argument, Mapping):
            return {str(k): self.write(v) for k, v in sorted(argument.items())}
        return self._plain(argument)

    def _node(self, node: fx.Node) -> Any:
        if node in self._seen:
            return {"same": self._seen[node]}
        self._seen[node] = len(self._seen)
        if node.op == "get_attr" and "val" not in node.meta:
            found = subgraph(node)
            return self._tensors(found) if isinstance(found, torch.Tensor) else _digest(found)
        return self._tensors(node.meta.get("val"))

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            written = [str(value.dtype).removeprefix("torch."), *map(_integers, _layout(value))]
            return written + ([value.device.type] if value.device.type != self._device else [])
        if isinstance(value, tuple | list):
            return [self._tensors(v) for v in value]
        return self._plain(value)

    def _plain(self, argument: Any) -> Any:
        if argument is None or isinstance(argument, bool | str):
            return argument
        if isinstance(argument, int | torch.SymInt):
            return int(argument)
        if isinstance(argument, float | torch.SymFloat):
            return float(argument)
        if isinstance(argument, torch.device):
            return "" if argument.type == self._device else argument.type
        if isinstance(argument, torch.dtype | torch.layout | torch.memory_format | complex | slice):
            return str(argument)
        if callable(argument):
            return _callable_name(argument)
        return type(argument).__qualname__  # a generator, a script object: no address in the text


def _callable_name(target: Any) -> str:
    if isinstance(target, OpOverload | HigherOrderOperator):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _layout(tensor: torch.Tensor) -> tuple[Iterable[Any], Iterable[Any]]:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else ()


def _integers(sizes: Iterable[Any]) -> list[int]:
    return [int(s) for s in sizes]


def _digest(module: torch.nn.Module) -> str:
    """Stands for an argument graph: its code, with the shapes of what it computes."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__qualname__
    rows = [module.code]
    rows += [str(_Writer(torch.device("cpu")).write(n)) for n in module.graph.nodes]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]
