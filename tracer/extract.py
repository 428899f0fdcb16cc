"""From the joint fx graph to the computation graph: values, aliases, phases, kinds, costs.

Which outputs receive a gradient is known only when backward starts (a Hugging Face model returns
loss and logits, and people call `loss.backward()`). A graph is therefore extracted for a
*pattern*: the set of tangents assumed absent. Nodes that depend on absent tangents alone are zero
and cost nothing; adding zero is an alias. The operations and their indices are the same for every
pattern, so an order found for one can be run under another.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracer.accumulation import additions
from tracer.capture import JointGraph
from tracer.costs import CostModel
from tracer.graph import ComputationGraph, Kind, Operation, Phase, Value
from tracer.operators import (
    aliased_input,
    is_backward,
    is_random,
    is_recomputable,
    tensors_of,
    viewed,
)
from tracer.views import views_behind

_CPU_STATE_BYTES = torch.get_rng_state().numel()
_CUDA_STATE_BYTES = 16  # seed and offset, as torch.cuda.get_rng_state gives them


@dataclass(frozen=True)
class Zeros:
    """What is zero or an alias under a pattern of absent tangents.

    Attributes:
        zero: nodes whose results are zero.
        alias: nodes that equal another one because they add zero to it.
        written: zero nodes that must exist as tensors, because an operator that mixes them with
            others needs its argument.
    """

    zero: frozenset[fx.Node]
    alias: dict[fx.Node, fx.Node]
    written: frozenset[fx.Node]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The computation graph of a step, and where its parts stand in the fx graph.

    Attributes:
        joint: the captured graph, with protective copies of inputs that forward replaces.
        graph: operations and values with costs.
        op_nodes: for each operation its fx node (None: the loss outside of the model); op_index:
            the inverse.
        value_of: for each fx node that is one storage, its value.
        owners: for each value the node that owns the storage (None: random-number state).
        gradient_values: for each primal the value of its gradient; None where it gets none.
        protective: operations that copy an input only because forward replaces its content.
        absent: indices of the tangents assumed absent; zeros: what follows from it.
    """

    joint: JointGraph
    graph: ComputationGraph
    op_nodes: tuple[fx.Node | None, ...]
    op_index: dict[fx.Node, int]
    value_of: dict[fx.Node, int]
    owners: tuple[fx.Node | None, ...]
    gradient_values: tuple[int | None, ...]
    protective: frozenset[int]
    absent: frozenset[int]
    zeros: Zeros

    @property
    def outside_loss(self) -> int | None:
        """Bytes that the caller's loss holds while it makes the tangents; None without backward."""
        if None not in self.op_nodes:
            return None
        return self.graph.operations[self.op_nodes.index(None)].workspace

    def with_outside_loss(self, nbytes: int) -> StepGraph:
        """The same where the loss holds so much: nothing if other graphs make the tangents."""
        if None not in self.op_nodes:
            return self
        at = self.op_nodes.index(None)
        operations = list(self.graph.operations)
        operations[at] = dataclasses.replace(operations[at], workspace=nbytes)
        graph = dataclasses.replace(self.graph, operations=tuple(operations))
        return dataclasses.replace(self, graph=graph)

    def without_gradient(self) -> dict[int, int | None]:
        """Primals whose gradient is zero because tangents are absent.

        Each with the operation that makes it where they arrive; None if it is a tangent or a value
        of the forward pass itself.
        """
        found: dict[int, int | None] = {}
        for primal, gradient in enumerate(self.joint.gradients):
            if gradient is not None and self.gradient_values[primal] is None:
                root = _root(gradient, _NO_ZEROS)
                call = root.args[0] if root.target is operator.getitem else root
                found[primal] = self.op_index.get(call) if isinstance(call, fx.Node) else None
        return found


_NO_ZEROS = Zeros(frozenset(), {}, frozenset())


def loss_bytes(outputs: Iterable[int]) -> int:
    """Bytes that a loss of the caller's holds at most, from those of the outputs it is made from.

    While it makes the tangent, cross-entropy holds log-probabilities and the gradient of its last
    step, twice the tangent's bytes; the mean of squares holds three times as much.
    """
    return 3 * sum(outputs)


def in_float32(tensor: torch.Tensor, nbytes: int) -> int:
    """Bytes of the same elements as a loss reckons with them, under autocast or by its own cast.

    Cross-entropy of bfloat16 logits holds log-probabilities and gradients in float32.
    """
    return nbytes * max(1, torch.float32.itemsize // tensor.element_size())


def likely_absent(joint: JointGraph) -> frozenset[int]:
    """The tangents that will probably not arrive.

    If the model returns a scalar that needs a gradient it is a loss, and nobody differentiates the
    outputs that it was made from (logits, hidden states). Outputs that no scalar depends on are
    used by a loss outside of the model, and a scalar beside them is a part of it (a router's
    balance, a divergence).
    """
    made_from: set[fx.Node] = set()
    for tangent in filter(_is_scalar, joint.tangents):
        made_from |= _ancestors(joint.differentiated(tangent))
    return frozenset(
        i
        for i, tangent in enumerate(joint.tangents)
        if not _is_scalar(tangent) and _before_casts(joint.differentiated(tangent)) in made_from
    )


def _ancestors(node: fx.Node | None) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node] if node is not None else []
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def _before_casts(node: fx.Node | None) -> fx.Node | None:
    """What an output is another shape or precision of."""
    while node is not None:
        root = _root(node, _NO_ZEROS)
        cast = root.op == "call_function" and str(root.target) == "aten._to_copy.default"
        if not cast:
            return root
        node = root.all_input_nodes[0]
    return None


def protect_mutated_inputs(joint: JointGraph) -> None:
    """Copies inputs that forward replaces, in the graph, before anything reads them.

    Backward and recomputation must see the old content (BatchNorm's running statistics). A copy
    that nothing needs after forward is not made when the step runs.
    """
    graph = joint.module.graph
    mutated = joint.mutated_primals
    for index, primal in enumerate(joint.primals):
        users = list(primal.users)
        if index not in mutated or all(u.op == "output" for u in users) or _is_protected(primal):
            continue
        with graph.inserting_before(_first_operation(graph)):
            copy = graph.call_function(torch.ops.aten.clone.default, (primal,))
        copy.meta.update(
            val=primal.meta["val"].clone(), partitioner_tag="is_forward", protective=True
        )
        for user in users:
            user.replace_input_with(primal, copy)
    joint.module.recompile()


def extract(
    joint: JointGraph,
    costs: CostModel,
    *,
    absent: frozenset[int],
    fixed_bytes: tuple[tuple[str, int], ...] = (),
    accumulate: bool = False,
    few_slices: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> StepGraph:
    """Builds the computation graph of a captured step under a pattern of absent tangents."""
    protect_mutated_inputs(joint)
    zeros = _zeros(joint, absent)
    nodes = [n for n in joint.module.graph.nodes if _is_operation(n)]
    nodes.sort(key=is_backward)  # stable: forward operations first
    # Measured in any case: the same step with gradients before it is planned in the training loop.
    added = additions(n for n in joint.gradients if n is not None)
    costs.prepare([*nodes, *added.values()], progress)
    builder = _Builder(joint, zeros, costs)
    for gradient, call in added.items() if accumulate else ():
        builder.leaving_ns[_root(gradient, zeros)] += costs.adding_ns(call)
    step = builder.build(nodes, absent, fixed_bytes, accumulate)
    if not few_slices:
        return step
    return dataclasses.replace(step, graph=dataclasses.replace(step.graph, few_slices=True))


class _Builder:
    """Collects values and operations in one pass over the nodes."""

    def __init__(self, joint: JointGraph, zeros: Zeros, costs: CostModel) -> None:
        self.joint, self.zeros, self.costs = joint, zeros, costs
        self.values: list[Value] = []
        self.owners: list[fx.Node | None] = []
        self.value_of: dict[fx.Node, int] = {}
        self.operations: list[Operation] = []
        outputs = [n for n in joint.outputs if isinstance(n, fx.Node)]
        self.outputs = {_root(n, zeros) for n in outputs}
        self.gradients = {_root(n, zeros) for n in joint.gradients if n is not None}
        self.modules = _module_by_sequence(joint)
        # Of gradients: the views that they leave as, and what adds them to those that exist.
        self.leaving_ns: Counter[fx.Node] = Counter()
        self.views: dict[bool, set[fx.Node]] = {True: set(), False: set()}  # made, by phase
        for gradient in filter(None, joint.gradients):
            views = views_behind([gradient], self.views[False])
            self.leaving_ns[_root(gradient, zeros)] += views * costs.view_ns

    def build(
        self,
        nodes: list[fx.Node],
        absent: frozenset[int],
        fixed_bytes: tuple[tuple[str, int], ...],
        accumulate: bool,
    ) -> StepGraph:
        for node in self.joint.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._outside(node, absent)
        op_nodes: list[fx.Node | None] = []
        for node in nodes:
            if is_backward(node) and self.operations[-1].is_forward:
                self._outside_loss(op_nodes, absent)
            self._operation(node)
            op_nodes.append(node)
        for node in self.joint.module.graph.nodes:
            self._resolve(node)
        self._note_gradients()
        graph = ComputationGraph(
            tuple(self.operations), tuple(self.values), fixed_bytes, accumulate
        )
        return StepGraph(
            self.joint,
            graph,
            tuple(op_nodes),
            {n: i for i, n in enumerate(op_nodes) if n is not None},
            self.value_of,
            tuple(self.owners),
            tuple(self._gradient(g) for g in self.joint.gradients),
            frozenset(i for i, n in enumerate(op_nodes) if n and n.meta.get("protective")),
            absent,
            self.zeros,
        )

    def _outside(self, node: fx.Node, absent: frozenset[int]) -> None:
        tensors = tensors_of(node)
        kind = Kind.RESIDENT
        if node in self.joint.tangents:
            kind = Kind.TANGENT
        size = sum(self.costs.allocated(_storage_bytes(t)) for t in tensors)
        if kind is Kind.TANGENT and self.joint.tangents.index(node) in absent:
            size = 0  # numbered all the same: forward values have one number in every pattern
        self.value_of[node] = self._value(node, node.name, size, kind, None)

    def _outside_loss(self, op_nodes: list[fx.Node | None], absent: frozenset[int]) -> None:
        """Stands for the loss that the caller computes from outputs that are not scalars."""
        tangents = [t for i, t in enumerate(self.joint.tangents) if i not in absent]
        made = [v for t in tangents if not _is_scalar(t) for v in tensors_of(t)]
        held = loss_bytes(self.costs.allocated(in_float32(v, _storage_bytes(v))) for v in made)
        index = len(self.operations)  # there in every pattern: operations keep their numbers
        self.operations.append(
            Operation(index, "loss", "the caller's loss", Phase.BACKWARD, (), (), 0, held, False)
        )
        op_nodes.append(None)

    def _operation(self, node: fx.Node) -> None:
        index = len(self.operations)
        forward = not is_backward(node)
        silent = node in self.zeros.zero or node in self.zeros.alias
        cost = self.costs.cost(node)
        outputs: list[int] = []
        time_ns = 0
        if not silent:
            views = views_behind(node.all_input_nodes, self.views[forward])
            time_ns = cost.time_ns + views * self.costs.view_ns
            for owner, nbytes in _results(node, cost.outputs):
                time_ns += 0 if forward else self.leaving_ns[owner]
                kind = self._kind(owner, forward)
                size = self.costs.allocated(nbytes)
                outputs.append(self._value(owner, owner.name, size, kind, index))
                self.value_of[owner] = outputs[-1]
        elif node in self.zeros.written:
            size = self.costs.allocated(_nominal(node))
            outputs = [self._value(node, node.name, size, Kind.TEMPORARY, index)]
            self.value_of[node] = outputs[0]
        # A protective copy made later would copy what forward has put in the input's place.
        recomputable = forward and is_recomputable(node) and not node.meta.get("protective")
        state, replay = None, 0
        if recomputable and is_random(node):
            replay = state_bytes(node)  # a second run holds the state that it will put back
            state = self._value(None, node.name + ".state", replay, Kind.STATE, index)
        module, source = self._where(node)
        self.operations.append(
            Operation(
                index,
                node.name,
                str(node.target),
                Phase.FORWARD if forward else Phase.BACKWARD,
                tuple(dict.fromkeys(self._inputs(node))),
                tuple(outputs),
                time_ns,
                0 if silent else cost.workspace + replay,
                recomputable,
                state,
                module,
                source,
            )
        )

    def _inputs(self, node: fx.Node) -> Iterable[int]:
        for source in node.all_input_nodes:
            value = self._resolve(source)
            if value is not None:
                yield value

    def _resolve(self, node: fx.Node) -> int | None:
        """Value behind a node: its own, or that of what it aliases."""
        if node in self.value_of:
            return self.value_of[node]
        root = _root(node, self.zeros)
        value = self.value_of.get(root)
        if value is not None:
            self.value_of[node] = value
        return value

    def _kind(self, owner: fx.Node, forward: bool) -> Kind:
        if forward:
            return Kind.OUTPUT if owner in self.outputs else Kind.ACTIVATION
        return Kind.GRADIENT if owner in self.gradients else Kind.TEMPORARY

    def _note_gradients(self) -> None:
        """Notes on each gradient what it is the gradient of."""
        for primal, node in zip(self.joint.primals, self.joint.gradients, strict=True):
            index = self._gradient(node)
            if index is not None and self.values[index].kind is Kind.GRADIENT:
                of = (*self.values[index].of, self.value_of[primal])
                self.values[index] = dataclasses.replace(self.values[index], of=of)

    def _gradient(self, node: fx.Node | None) -> int | None:
        return None if node is None else self._resolve(node)

    def _value(
        self, owner: fx.Node | None, name: str, nbytes: int, kind: Kind, producer: int | None
    ) -> int:
        index = len(self.values)
        first = next(iter(tensors_of(owner)), None) if owner is not None else None
        shape = tuple(int(s) for s in first.shape) if first is not None else ()
        dtype = str(first.dtype).removeprefix("torch.") if first is not None else ""
        self.values.append(Value(index, name, nbytes, kind, producer, shape, dtype))
        self.owners.append(owner)
        return index

    def _where(self, node: fx.Node) -> tuple[str, str]:
        module = _module_path(node)
        if not module:
            module = self.modules.get(node.meta.get("seq_nr", -1), "")
        return module, _source(node)


def _zeros(joint: JointGraph, absent: frozenset[int]) -> Zeros:
    """Follows absent tangents through the graph: every backward operator is linear in them."""
    tangents = joint.tangents
    depends = set(tangents)
    zero = {t for i, t in enumerate(tangents) if i in absent}
    alias: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op != "call_function":
            continue
        linear = [n for n in node.all_input_nodes if n in depends]
        if not linear:
            continue
        depends.add(node)
        none = [n for n in linear if n in zero]
        if len(none) == len(linear):
            zero.add(node)
        elif none and _is_plain_add(node) and len(linear) == 2:
            alias[node] = next(n for n in linear if n not in zero)
        else:
            written.update(none)
    return Zeros(frozenset(zero), alias, frozenset(written))


def _is_plain_add(node: fx.Node) -> bool:
    """x + y of equal types, which is x where y is zero."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    left, right = (a.meta.get("val") if isinstance(a, fx.Node) else None for a in node.args[:2])
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return left.shape == right.shape and left.dtype == right.dtype


def _is_operation(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return aliased_input(node) is None


def _is_scalar(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() == 0


def _is_protected(primal: fx.Node) -> bool:
    return any(u.meta.get("protective") for u in primal.users)


def _first_operation(graph: fx.Graph) -> fx.Node:
    for node in list[fx.Node](graph.nodes):
        if node.op != "placeholder":
            return node
    raise LookupError("the graph has no node but placeholders")


def _root(node: fx.Node, zeros: Zeros) -> fx.Node:
    """The node that owns the storage behind a node."""
    while (below := zeros.alias.get(node) or viewed(node)) is not None:
        node = below
    return node


def _results(node: fx.Node, kept: tuple[int, ...] | None) -> Iterable[tuple[fx.Node, int]]:
    """The nodes that own an operation's results, with their bytes; elements nobody reads too."""
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        size = kept[0] if kept else sum(_storage_bytes(t) for t in tensors_of(node))
        yield node, size
        return
    elements = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    sizes = iter(kept) if kept else None
    for position, item in enumerate(val):
        if not isinstance(item, torch.Tensor):
            continue
        size = next(sizes) if sizes is not None else _storage_bytes(item)
        element = elements.get(position)
        yield (element if element is not None else _ghost(node, position)), size


def _ghost(node: fx.Node, position: int) -> fx.Node:
    """An element that nobody takes still occupies memory until its operation has returned."""
    with node.graph.inserting_after(node):
        element = node.graph.call_function(operator.getitem, (node, position))
    element.meta.update(
        val=node.meta["val"][position], partitioner_tag=node.meta.get("partitioner_tag")
    )
    return element


def _storage_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage().nbytes())


def _nominal(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def state_bytes(node: fx.Node) -> int:
    """Bytes of the random-number state that a call draws from."""
    device = next((t.device.type for t in tensors_of(node)), "cpu")
    return _CPU_STATE_BYTES if device == "cpu" else _CUDA_STATE_BYTES


def _module_path(node: fx.Node) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['[^']*'\]\.?", "", path)
    return re.sub(r"\.(?:__dict__\['_modules'\]|_modules)\['([^']*)'\]", r".\1", path)


def _module_by_sequence(joint: JointGraph) -> dict[int, str]:
    """Modules of forward nodes by autograd sequence number, which backward nodes share."""
    found: dict[int, str] = {}
    for node in joint.module.graph.nodes:
        number = node.meta.get("seq_nr")
        path = _module_path(node)
        if number is not None and path and not is_backward(node):
            found[number] = path
    return found


def _source(node: fx.Node) -> str:
    """file:line of the innermost frame of the user's code."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{places[-1][0]}:{places[-1][1]}" if places else ""
