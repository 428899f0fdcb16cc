"""What one forward call ran: captured graphs in order, and the tensors that lie between them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from runtime.torch_private import recorded_at, recorded_next, saved_by_autograd, tree_leaves
from tracer.torch_private import inner_tensors, storage_key


class Recording:
    """Follows one forward call of a model that is captured in pieces.

    Attributes:
        calls: (graph, arguments) of each piece, in order.
        unknown: whether some piece had no plan.
        largest: bytes of the largest tensor between pieces.
    """

    def __init__(self, resident: Iterable[Any]) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.unknown = False
        self._counts: Counter[Hashable] = Counter()
        self._known = {storage_key(t) for t in _plain(resident)}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._noted: list[tuple[int, int]] = []  # when it was made, bytes
        self._starts: list[int] = []
        self._returned: list[torch.Tensor] = []
        self.largest = 0

    def add(self, executor: Hashable, arguments: tuple[Any, ...]) -> int:
        """Notes a piece; returns how often it ran before in this call."""
        self.calls.append((executor, arguments))
        self._starts.append(recorded_next())
        # Parameters are held anyway, or gathered for this piece alone (FSDP2).
        self._note(a for a in arguments if not isinstance(a, torch.nn.Parameter))
        occurrence = self._counts[executor]
        self._counts[executor] += 1
        return occurrence

    def finish(self, outputs: Any, resident: Iterable[Any]) -> None:
        """Takes what the forward returned, and what Python's own autograd nodes save.

        `resident` may have changed in the forward (parameters that FSDP2 has gathered).
        """
        self._known |= {storage_key(t) for t in _plain(resident)}
        leaves = list(_tensors_within(outputs))
        self._returned = list(filter(_gets_gradient, tree_leaves(outputs)))
        if any(t.numel() == 1 for t in self._returned):  # a loss: nobody differentiates the rest
            self._returned = []
        self._note(leaves)
        self._note(saved_by_autograd(leaves))

    def beside(self, piece: int, outputs: int) -> int:
        """Bytes that cross between pieces, are returned, or are saved by Python's own nodes.

        Without what the piece makes itself, which is among its `outputs` bytes.
        """
        start, *later = self._starts[piece:]
        own = [n for made, n in self._noted if start <= made and not (later and made >= later[0])]
        return sum(n for _, n in self._noted) - min(sum(own), outputs)

    @property
    def differentiated(self) -> tuple[torch.Tensor, ...]:
        """The returned tensors that the caller may make a loss from."""
        return tuple(self._returned)

    def waiting(self) -> list[int]:
        """For each piece the bytes of gradients that wait while its backward runs.

        What was made before the piece and is read after it, at last by the caller's loss, has its
        gradient from there and needs it in earlier pieces.
        """
        gradients: dict[int, tuple[int, int, int]] = {}
        read = [*(arguments for _, arguments in self.calls), self._returned]
        for reader, arguments in enumerate(read):
            for tensor in filter(_gets_gradient, arguments):
                for part in inner_tensors(tensor):
                    nbytes = part.untyped_storage().nbytes()
                    gradients[storage_key(part)] = recorded_at(tensor), reader, nbytes
        return [
            sum(n for made, reader, n in gradients.values() if made < start and reader > piece)
            for piece, start in enumerate(self._starts)
        ]

    def _note(self, things: Iterable[Any]) -> None:
        for whole in things:
            for tensor in _plain((whole,)):
                storage = tensor.untyped_storage()
                key = storage_key(tensor)
                # A number is used again when its storage is gone: only a living one is the same.
                if key in self._known or (key in self._seen and self._seen[key]() is not None):
                    continue
                self._seen[key] = weakref.ref(storage)
                self._noted.append((recorded_at(whole), storage.nbytes()))
                self.largest = max(self.largest, storage.nbytes())


def _plain(things: Iterable[Any]) -> Iterable[torch.Tensor]:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield from inner_tensors(thing)


def _gets_gradient(argument: Any) -> bool:
    """Of those that a piece hands back to autograd; parameters keep theirs."""
    if not isinstance(argument, torch.Tensor) or isinstance(argument, torch.nn.Parameter):
        return False
    return argument.requires_grad


def _tensors_within(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a forward returned, also in objects that pytree does not know.

    A key-value cache is one: it lives as long as the caller holds the output.
    """
    seen: set[int] = set()
    pending = [thing]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, str | type | torch.nn.Module):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
            continue
        pending += getattr(item, "__dict__", {}).values()
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item
