"""A captured graph together with how it was called."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from planner.data_parallel import Buckets
from runtime.execute import StepExecutor
from tracer.capture import JointGraph
from tracer.concrete import Binding
from tracer.errors import PlannerError

log = logging.getLogger("planner")


@dataclass(frozen=True, eq=False)
class Traced:
    """One captured step: its executor and the arguments that the captured graph was called with.

    `buckets` are those of the DistributedDataParallel around it.
    """

    executor: StepExecutor
    arguments: tuple[Any, ...]
    sizes: tuple[tuple[str, int], ...] = ()  # planned ahead for these instead of the arguments'
    buckets: Buckets = Buckets()  # noqa: RUF009 - frozen

    def enlarged(self, largest: Sequence[tuple[torch.Tensor, int, int]]) -> Traced:
        """The same step with other sizes of dimensions: (tensor, dimension, size)."""
        symbols = self.executor.joint.symbols
        sizes: dict[str, int] = {}
        for tensor, dim, size in largest:
            at = next((i for i, a in enumerate(self.arguments) if a is tensor), None)
            name = None if at is None else symbols.size_of(self.executor.joint.shape(at)[dim])
            if name is not None:
                sizes[name] = max(size, sizes.get(name, 0))
            elif size != tensor.shape[dim]:
                log.warning(
                    "dynamic: the model fixes dimension %d of an input of shape %s; batches of "
                    "another size there are planned when they come",
                    dim,
                    tuple(tensor.shape),
                )
        return dataclasses.replace(self, sizes=tuple(sorted(sizes.items())))

    @property
    def held(self) -> tuple[Any, ...]:
        """What the step is called with, of the sizes planned for."""
        if not self.sizes:
            return self.arguments
        own = [n.meta.get("val") for n in self.joint.primals]
        pairs = zip(self.arguments, own, strict=False)
        return tuple(
            a if isinstance(a, torch.nn.Parameter) or not isinstance(a, torch.Tensor) else fake
            for a, fake in pairs
        )

    @cached_property
    def joint(self) -> JointGraph:
        """The captured graph, for the sizes of these arguments."""
        return self.executor.joint.at(self.binding)

    @cached_property
    def binding(self) -> Binding:
        """The sizes that the captured graph leaves open."""
        bound = self.executor.joint.symbols.bind(self.arguments)
        return tuple({**dict(bound), **dict(self.sizes)}.items())

    @cached_property
    def accumulate(self) -> bool:
        """Whether gradients are there already, so that new ones are added to them.

        Or copied into the buckets of DistributedDataParallel, which is the same to memory.
        """
        return self.buckets.views or any(
            isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf and a.grad is not None
            for a in self.arguments
        )

    def with_gradients(self) -> Traced:
        """The same, if its backward pass gives anything.

        Raises:
            PlannerError: it gives nothing.
        """
        if any(g is not None for g in self.joint.gradients):
            return self
        raise PlannerError(
            "the captured graph passes no gradient to any parameter: torch has no derivative for "
            "one of its operators on this device; try the model on another one"
        )

    def key(self, occurrence: int = 0) -> Key:
        """Of its program, where this graph ran `occurrence` times before in the step."""
        return self.executor, self.accumulate, self.buckets, occurrence, self.binding


Key = tuple[StepExecutor, bool, Buckets, int, Binding]
"""What a program belongs to: graph, gradients before it, buckets, occurrence, sizes."""
