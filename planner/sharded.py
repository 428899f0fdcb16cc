"""FSDP2 (`fully_shard`) inside of a planned module: what its runtime holds besides the shards.

The hooks of FSDP2 stay as they are and split the forward, so a model is captured in pieces, each on
the gathered parameters of its unit. What those hooks allocate is no part of any piece. In forward
a unit's parameters and the flat buffer they were gathered into are held; in backward the gathered
parameters of the unit that runs, the buffer of the one that is prefetched, and the input of the
last reduce-scatter. Units that are not resharded after forward (by default the root) stay gathered
to the end of backward, and the root's gradients are reduced last.

Reference: PyTorch FSDP, Zhao et al. 2023 (arXiv 2304.11277), and the documentation of
`torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.torch_private import sharded_units
from tracer.errors import PlannerError


@dataclass(frozen=True)
class Sharding:
    """What FSDP2 holds while a step runs; all zero without FSDP2.

    Attributes:
        gathered: bytes of whole parameters, and of the buffers they are gathered into.
        waiting: bytes of whole gradients that are reduced last, or not in this step.
        reducing: bytes of the input of a reduce-scatter.
        share: part of a gradient that stays on this rank.
    """

    gathered: int = 0
    waiting: int = 0
    reducing: int = 0
    share: float = 1.0

    @property
    def held(self) -> tuple[tuple[str, int], ...]:
        """Held during the whole step, by owner."""
        return (("gathered parameters", self.gathered), ("gradients to reduce", self.waiting))

    def later(self, gradients: int) -> int:
        """Bytes held when a piece's backward starts after these gradients were made."""
        return math.ceil(gradients * self.share) + (self.reducing if gradients else 0)


def sharding_of(model: torch.nn.Module) -> Sharding:
    """What FSDP2 holds in a step of this model, as its settings are now."""
    units = sharded_units(model)
    if not units:
        return Sharding()
    kept = sum(u.gathered_bytes for u in units if not u.reshards)
    resharded = max((u.gathered_bytes for u in units if u.reshards), default=0)
    waiting = sum(u.gradient_bytes for u in units if u.is_root or not u.reduces)
    whole = sum(u.gradient_bytes for u in units)
    return Sharding(
        kept + 2 * resharded,
        waiting,
        max(u.reduce_bytes for u in units),
        sum(u.shard_bytes for u in units) / whole if whole else 1.0,
    )


def refuse_fsdp1(model: torch.nn.Module) -> None:
    """FSDP1 keeps flat parameters behind the module's back: no plan can see them.

    Raises:
        PlannerError: some submodule is a `FullyShardedDataParallel`.
    """
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise PlannerError(
                f"{name or 'model'} is a FullyShardedDataParallel (FSDP1), which torch has "
                "deprecated and which cannot be planned: wrap with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
