"""DistributedDataParallel around or inside of a planned module.

DDP keeps a second set of gradient-sized memory, its buckets, for the whole life of the wrapper.
They count towards the peak, whether the module is planned before it is wrapped (DDP is then seen at
the first step) or after.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from runtime.torch_private import active_data_parallel
from tracer.errors import PlannerError


def unwrap(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel | None]:
    """The module whose forward is planned, and the DDP wrapper around it, if there is one.

    Raises:
        PlannerError: `DataParallel`, whose replicas are modules that no plan was made for.
    """
    if isinstance(model, DataParallel):
        raise PlannerError(
            "model is a torch.nn.DataParallel, which copies the module in every step: no plan "
            "survives that. Use torch.nn.parallel.DistributedDataParallel, as torch advises"
        )
    if isinstance(model, DistributedDataParallel):
        return model.module, model
    return model, None


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets that a step runs with.

    Attributes:
        nbytes: of all buckets together.
        views: whether gradients live in the buckets (`gradient_as_bucket_view`). A new gradient is
            then copied there and let go, as if gradients accumulated.
    """

    nbytes: int = 0
    views: bool = False


class Surroundings:
    """Finds the DDP wrapper that a step of `model` runs under; cheap enough for every step.

    `accumulates` says that gradients count as existing from the first step on: their memory is then
    that of one bucket, wrapper or not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        known: DistributedDataParallel | None = None,
        *,
        accumulates: bool = False,
    ) -> None:
        self._model = model
        self._known = Buckets() if known is None else _buckets_of(known)
        if accumulates and known is None:
            trained = (p for p in model.parameters() if p.requires_grad)
            self._known = Buckets(sum(p.numel() * p.element_size() for p in trained), views=True)
        self._last: weakref.ref[DistributedDataParallel] | None = None
        self._of_last = self._known

    def buckets(self) -> Buckets:
        """Of the wrapper whose forward runs; outside of one, of the wrapper known from before."""
        active = active_data_parallel()
        if active is None:
            return self._known
        if self._last is None or self._last() is not active:
            ours = any(m is self._model for m in active.modules())
            self._last = weakref.ref(active)
            self._of_last = _buckets_of(active) if ours else self._known
        return self._of_last

    def unseen_bytes(self) -> int:
        """Bytes of the buckets beyond what the parameters' `grad` already show."""
        buckets = self.buckets()
        if not buckets.views:
            return buckets.nbytes
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
        return max(0, buckets.nbytes - sum(storages.values()))


def _buckets_of(wrapper: DistributedDataParallel) -> Buckets:
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    named = wrapper.module.named_parameters()
    reduced = [p for name, p in named if p.requires_grad and name not in ignored]
    nbytes = sum(p.numel() * p.element_size() for p in reduced)
    return Buckets(nbytes, bool(wrapper.gradient_as_bucket_view))
