"""Costs under a compiler that fuses: a chain of element-wise operations is one pass over memory.

Times come from another cost model, operator by operator. An operation that a compiler fuses with
its neighbours does not read what a fused neighbour has just computed, nor write what only fused
neighbours read: it pays for the share of its bytes that really moves. Values that backward reads
are written, since a plan may save them.

Sizes stay those of the operators, of which fused kernels hold fewer. But one kernel may compute at
one time what the schedule computes apart, with readers in between (the gradients of both factors
of a product), or move an operation ahead. While an element-wise operation with such neighbours
runs, room for `BESIDE` more results of its size is counted; during the whole step, `moved_ahead`.
And a kernel that does the work of a chain, a sum of many products for one, reads at its end what
the schedule has dropped on the way: the last of a chain has room for that. The backward of a norm
that reduces over more than rows ends such a chain, and what it reads twice is written in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from tracer.costs import CostModel, OperationCost, Progress, output_tensors, storage_bytes
from tracer.operators import aliased_input, is_random
from tracer.torch_private import OpOverload

aten = torch.ops.aten

# Reductions along rows, which compilers fuse with what is element-wise around them.
_ROWS = (
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten.native_layer_norm,
    aten.native_group_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.mean,
    aten.sum,
    aten.var_mean,
)

# Reductions over more than rows, taken apart into several kernels. The gradient that comes in and
# what its chain computes on the way stand in between as float32, whatever their dtype.
_NORMS_BACKWARD = (aten.native_group_norm_backward, aten.native_batch_norm_backward)

BESIDE = 2
MEMBERS = 64  # operations of one kernel, at most: Inductor's own limit
REPEATED = 4  # operations whose results have one size: those of blocks, not of the loss


class FusedCosts:
    """Costs of another model, less the bytes that fused kernels do not move."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def allocated(self, nbytes: int) -> int:
        """See `CostModel`."""
        return self._costs.allocated(nbytes)

    @property
    def unmeasured(self) -> Mapping[str, str]:
        """See `CostModel`."""
        return self._costs.unmeasured

    @property
    def view_ns(self) -> int:
        """Nothing: compiled code computes with addresses, and makes no views."""
        return 0

    def prepare(self, nodes: Sequence[fx.Node], progress: Progress | None = None) -> None:
        """See `CostModel`."""
        self._costs.prepare(nodes, progress)

    def adding_ns(self, call: fx.Node) -> int:
        """See `CostModel`."""
        return self._costs.adding_ns(call)

    def cost(self, node: fx.Node) -> OperationCost:
        """The cost of one node, with the time of the bytes that move."""
        cost = self._costs.cost(node)
        if _is_norm_backward(node):
            return OperationCost(cost.time_ns, cost.workspace + self._between(node), cost.outputs)
        if not is_fused(node):
            return cost
        moved, every = _bytes(node)
        time_ns = round(cost.time_ns * moved / every) if every else 0
        return OperationCost(time_ns, cost.workspace + self._beside(node), cost.outputs)

    def _beside(self, node: fx.Node) -> int:
        """Bytes that a fused kernel holds and the schedule does not."""
        if not _has_neighbours(node):
            return 0
        read, held = _chain(node)
        waiting = sum(map(self._allocated, read)) - sum(map(self._allocated, held))
        return max(BESIDE * self._allocated(node), waiting)

    def _between(self, node: fx.Node) -> int:
        """Bytes that the kernels of a norm's backward hand to each other."""
        (gradient,) = output_tensors(node.all_input_nodes[0])
        return BESIDE * self.allocated(int(gradient.numel()) * torch.float32.itemsize)

    def _allocated(self, node: fx.Node) -> int:
        return self.allocated(_size(node))


def moved_ahead(nodes: Iterable[fx.Node]) -> int:
    """Bytes of `BESIDE` element-wise results, of the largest size that stands in several blocks."""
    sizes = Counter(_size(n) for n in nodes if is_fused(n) and not _phase(n) and _is_pointwise(n))
    repeated = [size for size, count in sizes.items() if count >= REPEATED]
    return BESIDE * max(repeated or sizes, default=0)


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler fuses the call with neighbours: element-wise, or a reduction of rows."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_random(node):
        return False
    return _is_pointwise(node) or target.overloadpacket in _ROWS


def _is_norm_backward(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _NORMS_BACKWARD


def _bytes(node: fx.Node) -> tuple[int, int]:
    """(bytes that the call moves in a fused kernel, bytes that it moves by itself)."""
    moved = every = 0
    for source in node.all_input_nodes:
        size = _size(source)
        every += size
        maker = _maker(source)
        if not (is_fused(maker) and _phase(maker) == _phase(node)):
            moved += size
    size = _size(node)
    readers = _readers(node)
    inside = readers and all(is_fused(r) and _phase(r) == _phase(node) for r in readers)
    return moved + (0 if inside else size), every + size


def _has_neighbours(node: fx.Node) -> bool:
    """Whether it is element-wise and fused with another operation of its phase."""
    near = [*map(_maker, node.all_input_nodes), *_readers(node)]
    return _is_pointwise(node) and any(is_fused(n) and _phase(n) == _phase(node) for n in near)


def _chain(node: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """What earlier members of the chain that ends here read, and this operation does not; and the
    members whose results it reads, which the schedule holds in their place.
    """
    members, read = [node], set[fx.Node]()
    for member in members:
        for maker in map(_maker, member.all_input_nodes):
            inside = _is_pointwise(maker) and _phase(maker) == _phase(node)
            if inside and _readers(maker) == [member] and len(members) < MEMBERS:
                members.append(maker)
            elif maker.op == "call_function":
                read.add(maker)
    own = set(map(_maker, node.all_input_nodes))
    return read - own, [m for m in members[1:] if m in own]


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _size(node: fx.Node) -> int:
    return sum(storage_bytes(t) for t in output_tensors(node))


def _maker(node: fx.Node) -> fx.Node:
    """The node behind views and elements of results."""
    while node.op == "call_function":
        below = aliased_input(node)
        if below is None and isinstance(node.target, OpOverload):
            return node
        below = below or node.all_input_nodes[0]
        node = below
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Operations that read a result, through views and elements; outputs of the graph, too."""
    found: list[fx.Node] = []
    for user in node.users:
        through = user.op == "call_function" and (
            not isinstance(user.target, OpOverload) or aliased_input(user) is not None
        )
        found += _readers(user) if through else [user]
    return found


def _phase(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
