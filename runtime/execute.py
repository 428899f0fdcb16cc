"""Runs rewritten graphs inside autograd: one node per slice of the backward pass.

    arguments -> gate_K -> ... -> gate_1 -> forward (AOTAutograd's node) -> outputs

Every argument that needs a gradient passes through the gate of the slice that completes its
gradient, and a token links each gate to the next. In backward AOTAutograd's node runs first; it
only hands the tangents over and returns no gradient. Then gate 1 runs slice 1 and returns the
gradients completed there, autograd delivers them (hooks and accumulation included), gate 2 runs
slice 2, and so on. A single node around the whole backward would hold every gradient to its end.

What lives from forward to backward is kept by a node of its own through `save_for_backward`: torch
checks that nobody changed it in between, and saved-tensor hooks see it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch

from runtime.rewrite import Rewritten, Slice
from runtime.torch_private import (
    autocast_off,
    backward_pass,
    base_of,
    graph_kept,
    made_by_aot,
    same_view,
    tree_leaves,
    version_of,
)
from tracer.capture import JointGraph
from tracer.errors import PlannerError
from tracer.torch_private import storage_key

BOOKKEEPING_BYTES = 64
"""Tokens and anchors of one step: a handful of scalars."""


# Gradients of tensor subclasses are put together by AOTAutograd, at the end of its own node.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Program(Protocol):
    """What runs a captured step: made by the planner, chosen for each forward call."""

    @property
    def rewritten(self) -> Rewritten: ...

    def backward(self, absent: frozenset[int]) -> tuple[Slice, ...]:
        """The slices for a set of tangents that did not arrive."""
        ...


class StepExecutor:
    """Runs the steps of one captured graph under the program that `choose` gives.

    `choose(arguments)` is called at the start of each forward, outside of any tracing.
    """

    def __init__(
        self, joint: JointGraph, choose: Callable[[StepExecutor, Sequence[Any]], Program]
    ) -> None:
        self.joint = joint
        self._choose = choose
        self._num_gradients = len(joint.gradients)
        self._call: Callable[..., Any] | None = None

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo's side: takes the arguments of the captured graph, returns its outputs."""
        self._call = call
        return self._step

    def _step(self, *args: Any) -> Any:
        session = _Session(self._choose(self, args))
        gates = _Gates(session, self.joint, args)
        gated = gates.arguments if session.sliced else args
        with session.running():
            assert self._call is not None
            outputs = gates.opened(self._call(*gated))
            session.keep()
            session.adopt(outputs)
            session.watch(outputs)
        return outputs

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """AOTAutograd's side: primals in, forward outputs and the token out."""
        session = _Session.current()
        session.opaque = {i: args[p] for i, p in self.joint.opaque_gradients.items()}
        rewritten = session.program.rewritten
        results = rewritten.forward.forward(args)
        session.made = list(results[rewritten.num_outputs :])
        session.memory = {storage_key(results[i]) for i in rewritten.kept}
        session.returned = [r for r in results[: rewritten.num_outputs] if _is_new(r)]
        return (*results[: rewritten.num_outputs], session.token())

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """AOTAutograd's side: token and tangents in. Gradients leave through the gates."""
        token, *tangents = args
        args.clear()
        session = _Session.by_token(token)
        session.start_backward(tangents)
        del tangents
        gradients: list[Any] = [None] * self._num_gradients
        if not session.sliced:
            for _ in session.slices:
                for primal, gradient in session.run_slice():
                    gradients[primal] = gradient
        for position, part in session.opaque.items():
            gradients[position] = part
        return gradients


class _Session:
    """One forward call and the backward calls that belong to it."""

    _running: ClassVar = threading.local()
    _numbers: ClassVar = itertools.count()
    _by_number: ClassVar[weakref.WeakValueDictionary[int, _Session]] = weakref.WeakValueDictionary()

    def __init__(self, program: Program) -> None:
        self.program = program
        self.number = next(self._numbers)
        self._by_number[self.number] = self
        self.sliced = False
        self.made: list[Any] = []
        self.returned: list[torch.Tensor] = []  # what AOTAutograd's node is the node of
        self.opaque: dict[int, Any] = {}  # parts of gradients that are no tensors
        self.slices: tuple[Slice, ...] = ()
        self.memory: set[int] = set()  # of results that are saved, too
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._kept: Any = None
        self._others: dict[int, Any] = {}
        self._live: list[Any] = []
        self._done = 0
        self._ready: dict[int, Any] = {}  # gradients made before their gate's turn
        self._to_come: set[int] = set()  # primals whose gradients are not made yet
        self._pass = -1  # of all that is here on its way through backward

    # Forward

    def running(self) -> _Running:
        """Makes this the session of the forward that runs in this thread."""
        return _Running(self)

    @classmethod
    def current(cls) -> _Session:
        session: _Session = cls._running.session
        return session

    def token(self) -> torch.Tensor:
        """The number of this session, as the only tensor that AOTAutograd saves."""
        return torch.tensor(self.number, dtype=torch.int64)

    def keep(self) -> None:
        """Hands what forward made for backward over to autograd's care."""
        made, self.made = self.made, []
        self._others = {i: m for i, m in enumerate(made) if not isinstance(m, torch.Tensor)}
        if torch.is_grad_enabled():
            # What is part of a graph (outputs, parameters) must not tie this node to that graph.
            tensors = [
                m.detach() if m.requires_grad else m for m in made if isinstance(m, torch.Tensor)
            ]
            # The output is held, and not its node alone: the node's saved tensors live as long as
            # the C++ part of it, which the Python part does not own in torch 2.11.
            self._kept = _Keeper.apply(torch.empty((), requires_grad=True), *tensors)

    def adopt(self, outputs: Any) -> None:
        """Ties this to AOTAutograd's node, so that both live equally long.

        Also asks autograd for None where no gradient arrives, instead of zeros of the output's
        size. The node is that of what the captured graph returned; where AOTAutograd has put
        tensor subclasses around that, it is looked for behind the caller's outputs.
        """
        returned, self.returned = self.returned, []
        nodes = itertools.chain((r.grad_fn for r in returned), _nodes_behind(outputs))
        of_aot: Any = (n for n in nodes if made_by_aot(n) and "planned_step" not in n.metadata)
        node = next(of_aot, None)
        if node is not None:
            node.set_materialize_grads(False)
            node.metadata["planned_step"] = self

    def watch(self, outputs: Any) -> None:
        """Notes the versions of outputs over memory that backward reads.

        AOTAutograd gives an output that is a view of a result a version counter of its own, so
        that autograd does not see who writes to that memory.
        """
        if self.memory and torch.is_grad_enabled():
            found = [o for o in tree_leaves(outputs) if _is_strided(o)]
            found = [o for o in found if storage_key(o) in self.memory]
            self._watched = [(o.detach(), version_of(o)) for o in found]

    # Backward

    @classmethod
    def by_token(cls, token: torch.Tensor) -> _Session:
        session = cls._by_number.get(int(token))
        if session is None:
            raise PlannerError(
                "backward was called for a step whose forward is gone. If the planned module "
                "is called inside torch.utils.checkpoint, leave that out: the plan recomputes"
            )
        return session

    def start_backward(self, tangents: list[Any]) -> None:
        """Takes the saved values out and chooses the slices for the tangents that arrived."""
        if self._kept is None:
            raise RuntimeError(
                "Trying to backward through the planned step a second time, but its saved values "
                "have been freed. Specify retain_graph=True at the first backward."
            )
        if any(version_of(tensor) != version for tensor, version in self._watched):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an output of the planned module that is kept for backward, too "
                "(clone the output before you change it)"
            )
        absent = frozenset(i for i, t in enumerate(tangents) if t is None)
        self.slices = self.program.backward(absent)
        live = list(self._kept.grad_fn.saved_tensors)
        for position in sorted(self._others):
            live.insert(position, self._others[position])
        self._live = live + [t for t in tangents if t is not None]
        self._done = 0
        self._ready = {}
        self._to_come = {p for part in self.slices for p in part.primals}
        self._pass = backward_pass()
        if not graph_kept():
            self._kept, self._watched = None, []

    def gradients(self, primals: Sequence[int]) -> list[Any]:
        """Runs slices until these primals' gradients are there; None for those that get none.

        Gates and slices go together one by one, unless other tangents arrived than were planned
        for: then slices end elsewhere, and what comes early waits for its gate. What an earlier
        pass left undone (it was for some inputs only, or a hook raised) is none of this one's.
        """
        if self._pass != backward_pass():
            self._live, self._ready, self._to_come = [], {}, set()
        missing = {p for p in primals if p not in self._ready} & self._to_come
        while missing:
            for primal, gradient in self.run_slice():
                self._ready[primal] = gradient
                missing.discard(primal)
        return [self._ready.pop(p, None) for p in primals]

    def run_slice(self) -> list[tuple[int, Any]]:
        """Runs the next slice; returns (primal, gradient) pairs."""
        part = self.slices[self._done]
        live, self._live = self._live, []
        with torch.no_grad(), autocast_off():
            gradients, self._live = part.function.forward(live)
        self._done += 1
        self._to_come.difference_update(part.primals)
        return list(zip(part.primals, gradients, strict=True))


class _Running:
    """Context in which a session is the current one of its thread; calls may nest."""

    def __init__(self, session: _Session) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.outer = getattr(_Session._running, "session", None)
        _Session._running.session = self.session

    def __exit__(self, kind: object, *_: object) -> None:
        _Session._running.session = self.outer
        if kind is not None:  # its tensors lead back to it: it would outlive the forward
            self.session.made, self.session.returned = [], []


class _Gates:
    """Passes arguments through the gates, last slice first."""

    def __init__(self, session: _Session, joint: JointGraph, args: Sequence[Any]) -> None:
        self.arguments = list(args)
        self._behind: dict[int, torch.Tensor] = {}  # by what a gate gave out, what it was given
        if not joint.one_to_one or not torch.is_grad_enabled():
            return
        # Gates stand for gradients of other tangents than were planned for, too.
        gates = [(*part.primals, *part.others) for part in session.program.rewritten.slices]
        wanting = {p for primals in gates for p in primals if _needs_gradient(args, p)}
        session.sliced = (
            all(type(args[p]) in _PLAIN for p in wanting)
            and bool(wanting)
            and not (joint.mutated_primals & wanting)
        )
        if not session.sliced:
            return
        token = torch.empty((), requires_grad=True)
        for behind in reversed(gates):
            primals = [p for p in behind if p in wanting]
            token, *passed = _Gate.apply(session, primals, token, *(args[p] for p in primals))
            for primal, tensor in zip(primals, passed, strict=True):
                self.arguments[primal] = tensor
                self._behind[id(tensor)] = args[primal]

    def opened(self, outputs: Any) -> Any:
        """The same outputs, where they are arguments or views of them those of the caller's own.

        AOTAutograd makes them from what it was called with, the tensors behind the gates.
        """
        if not self._behind:
            return outputs
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(map(self._opened, outputs))
        return self._opened(outputs)

    def _opened(self, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        if id(output) in self._behind:
            return self._behind[id(output)]
        own = self._behind.get(id(base_of(output)))
        return output if own is None else same_view(output, own)


class _Gate(torch.autograd.Function):
    """Autograd node of one slice: the identity in forward, the slice in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        session: _Session,
        primals: list[int],
        token: torch.Tensor,
        *arguments: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.session, ctx.primals = session, primals
        ctx.set_materialize_grads(False)
        return (token.detach(), *(a.detach() for a in arguments))

    @staticmethod
    def backward(ctx: Any, _token: Any, *arrived: Any) -> tuple[Any, ...]:
        # Nothing arrives unless the caller got a view of what this gate gave out (see `opened`).
        made = ctx.session.gradients(ctx.primals)
        gradients = [_sum(*pair) for pair in zip(made, arrived, strict=True)]
        if torch.is_grad_enabled():  # create_graph: a second derivative must not be silently zero
            gradients = _refuse_second_derivative(gradients)
        return (None, None, None, *gradients)


class _Keeper(torch.autograd.Function):
    """Holds saved values as autograd holds them. Its node is never part of a backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise PlannerError("the node that holds saved values was run")


class _NoSecondDerivative(torch.autograd.Function):
    """Passes gradients on, and raises where someone differentiates them again."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> Any:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise PlannerError(
            "the gradients of a planned module cannot be differentiated again (double backward). "
            "Call plan.remove() for steps that need second derivatives."
        )


def _refuse_second_derivative(gradients: list[Any]) -> list[Any]:
    tensors = [g for g in gradients if g is not None]
    if not tensors:
        return gradients
    passed = iter(_NoSecondDerivative.apply(torch.empty((), requires_grad=True), *tensors))
    return [None if g is None else next(passed) for g in gradients]


def _sum(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return left + right  # a new tensor: either may be held by others


def _is_strided(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided


def _is_new(result: Any) -> bool:
    """Whether a result is a tensor of the captured graph's own: no argument of it, nor a view."""
    return isinstance(result, torch.Tensor) and not result.requires_grad


def _needs_gradient(args: Sequence[Any], primal: int) -> bool:
    argument = args[primal]
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _nodes_behind(outputs: Any) -> Iterator[Any]:
    """Autograd nodes of outputs, behind those of views that are made of them afterwards."""
    for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
        node: Any = output.grad_fn if isinstance(output, torch.Tensor) else None
        for _ in range(4):
            if node is None:
                break
            yield node
            node = node.next_functions[0][0] if node.next_functions else None
