"""What one forward call ran: captured graphs in order, and the tensors that lie between them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from runtime.torch_private import saved_by_autograd, tree_leaves
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
        self._bytes = 0
        self.largest = 0

    def add(self, executor: Hashable, arguments: tuple[Any, ...]) -> int:
        """Notes a piece; returns how often it ran before in this call."""
        self.calls.append((executor, arguments))
        # Parameters are held anyway, or gathered for this piece alone (FSDP2).
        self._note(a for a in arguments if not isinstance(a, torch.nn.Parameter))
        occurrence = self._counts[executor]
        self._counts[executor] += 1
        return occurrence

    def between(self, outputs: Any, resident: Iterable[Any]) -> int:
        """Bytes of what crosses between pieces, and of what Python's own autograd nodes save.

        `resident` may have changed in the forward (parameters that FSDP2 has gathered).
        """
        self._known |= {storage_key(t) for t in _plain(resident)}
        leaves = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        self._note(leaves)
        self._note(saved_by_autograd(leaves))
        return self._bytes

    def _note(self, things: Iterable[Any]) -> None:
        for tensor in _plain(things):
            storage = tensor.untyped_storage()
            key = storage_key(tensor)
            # A number is used again when its storage is gone: only a living one is the same.
            if key in self._known or (key in self._seen and self._seen[key]() is not None):
                continue
            self._seen[key] = weakref.ref(storage)
            self._bytes += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())


def _plain(things: Iterable[Any]) -> Iterable[torch.Tensor]:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield from inner_tensors(thing)
