"""Capture: from a module's forward to the joint forward-and-backward graph of its training step.

Dynamo turns the Python of the forward into a graph (and guards what it assumed); AOTAutograd traces
that graph together with its backward into one functional aten graph on fake tensors. Nothing is
executed and nothing of the model's size is allocated.

What runs later is up to the `Executor` that the caller provides for each captured graph.
AOTAutograd sees only a stand-in forward (outputs plus a token) and a stand-in backward (nothing
saved, no gradients): it keeps doing what it does well, the bookkeeping of aliases, mutations and
views at the border of the graph, while saved tensors and gradients are the executor's business.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import fx

from tracer.aliases import merge_views, own_gradients
from tracer.concrete import Binding, Symbols, concrete
from tracer.errors import PlannerError, UntraceableModel
from tracer.operators import BACKWARD
from tracer.torch_private import (
    CAPTURE_SWITCHES,
    DYNAMO_ERRORS,
    aot_joint,
    branches_on_data,
    break_after,
    break_of,
    capture_is_off,
    depends_on_data,
    dynamo_settings,
    forget_code,
    forward_failed,
    hooks_of,
    layouts_as_run,
    mark_varying,
    meta_as_cpu,
    no_fake_mode,
    ordinary_stance,
    recompile_limit_hit,
    unmark_varying,
)

Boxed = Callable[[list[Any]], Sequence[Any]]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The joint graph as AOTAutograd made it.

    Attributes:
        module: the fx graph: placeholders `primals_*` then `tangents_*`; output (forward outputs,
            gradients of the primals).
        num_forward_outputs: how many of the outputs belong to forward.
        one_to_one: whether primal i is argument i of the captured graph. If not (duplicate or
            overlapping inputs were merged, a tensor subclass was unwrapped), gradients can only be
            returned all at once.
        symbols: where the arguments say how large the sizes are that the graph leaves open.
        inputs: the fake arguments of the capture.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    one_to_one: bool
    symbols: Symbols = field(default_factory=lambda: Symbols(()))
    inputs: tuple[Any, ...] = ()

    def shape(self, position: int) -> tuple[Any, ...]:
        """Sizes of an argument of the captured graph, symbols where they are open."""
        return tuple(self.inputs[position].shape)

    def at(self, binding: Binding) -> JointGraph:
        """The same graph for these sizes.

        Raises:
            UntraceableModel: a size depends on the content of a tensor.
        """
        if not self.symbols.places:
            return self
        module = concrete(self.module, binding)
        merge_views(module.graph, self.num_forward_outputs)
        return JointGraph(module, self.num_forward_outputs, self.one_to_one)

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    @cached_property
    def primals(self) -> list[fx.Node]:
        return [n for n in self.placeholders if not n.name.startswith("tangents")]

    @cached_property
    def tangents(self) -> list[fx.Node]:
        return [n for n in self.placeholders if n.name.startswith("tangents")]

    @property
    def outputs(self) -> list[Any]:
        """Forward outputs: nodes, or constants."""
        return list(self._output_args[: self.num_forward_outputs])

    @property
    def gradients(self) -> list[fx.Node | None]:
        """One for each primal; None where it gets none."""
        opaque = self.opaque_gradients
        return [None if i in opaque else g for i, g in enumerate(self.backward_outputs)]

    @property
    def backward_outputs(self) -> list[fx.Node | None]:
        """What AOTAutograd expects of backward: gradients, with parts that are no tensors."""
        return list(self._output_args[self.num_forward_outputs :])

    @cached_property
    def opaque_gradients(self) -> dict[int, int]:
        """Positions in backward's outputs where a primal that is no tensor is handed back.

        The mesh of a DTensor is such a part of its gradient (since torch 2.13).
        """
        number = {n: i for i, n in enumerate(self.primals)}
        return {
            i: number[g]
            for i, g in enumerate(self.backward_outputs)
            if g in number and not isinstance(g.meta.get("val"), torch.Tensor)
        }

    @property
    def output_descriptions(self) -> list[str]:
        """What each forward output is, as AOTAutograd says; "" where it does not."""
        output = next(iter(self.module.graph.find_nodes(op="output")))
        said = output.meta.get("desc") or [""] * len(self._output_args)
        return [type(d).__name__ if d else "" for d in said[: self.num_forward_outputs]]

    def differentiated(self, tangent: fx.Node) -> fx.Node | None:
        """The forward output whose gradient a tangent is; None where AOTAutograd does not say."""
        output = next(iter(self.module.graph.find_nodes(op="output")))
        said = output.meta.get("desc") or []
        wanted = getattr(_whole(tangent.meta.get("desc")), "output", None)
        for description, node in zip(said, self.outputs, strict=False):
            if wanted is not None and _whole(description) == wanted and isinstance(node, fx.Node):
                return node
        return None

    @cached_property
    def mutated_primals(self) -> set[int]:
        """Indices of primals whose content the forward replaces (after it has run)."""
        output = next(iter(self.module.graph.find_nodes(op="output")))
        said = output.meta.get("desc") or []
        changed = [d.mutated_input for d in said if type(d).__name__ == "InputMutationAOTOutput"]
        return {
            i for i, n in enumerate(self.primals) if any(n.meta.get("desc") == m for m in changed)
        }

    @property
    def _output_args(self) -> list[Any]:
        output = next(iter(self.module.graph.find_nodes(op="output")))
        return list(output.args[0])


def _whole(description: Any) -> Any:
    """AOTAutograd's description of a tensor, given that of a part of it (of a DTensor, say)."""
    while hasattr(description, "base"):
        description = description.base
    return description


class Executor(Protocol):
    """Runs the steps of one captured graph."""

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Called with the primals; returns the forward outputs and then the token."""
        ...

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Called with the token and the tangents; returns one gradient (or None) per primal."""
        ...

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Given AOTAutograd's callable, returns the one that Dynamo calls with the arguments."""
        ...


@contextmanager
def sizes_may_vary(dimensions: Iterable[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """A capture within leaves the sizes of these dimensions open, where the model allows it."""
    marked = list(dimensions)
    for tensor, dim in marked:
        mark_varying(tensor, dim)
    try:
        yield
    finally:
        for tensor, _ in marked:
            unmark_varying(tensor)


_numbers = itertools.count()

ExecutorFactory = Callable[[JointGraph], Executor]


class GraphBreak(Exception):
    """Torch cannot trace the forward as one graph; says where and why."""


class ForwardFailed(PlannerError):
    """The forward itself fails for its arguments; found out without running it."""


class CompiledForward:
    """A callable with the signature of the model's forward that runs captured graphs.

    A new graph is captured whenever Dynamo's guards say that the last ones do not apply (another
    flag, a size that changes for the first time: it is a symbol from then on), and `make_executor`
    is called for it. A graph that needs no gradient runs as it is.

    Where torch cannot trace the forward as one graph, it is captured in pieces as it runs, and what
    lies between them stays Python.

    Attributes:
        breaks: where the forward leaves a graph, as "file:line: reason"; empty while it is one.
    """

    def __init__(self, model: torch.nn.Module, make_executor: ExecutorFactory) -> None:
        self.breaks: list[str] = []
        self._model, self._make_executor = model, make_executor
        self._captured_once = self._on_meta = False
        self._data = ""  # where the last graph would read a number out of a tensor
        self._compiled = self._compile(whole=True)
        self._watch()

    @property
    def whole(self) -> bool:
        """Whether the forward is one graph, as far as is known."""
        return not self.breaks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward.

        Raises:
            GraphBreak: it is not one graph. Nothing was executed; the next call runs pieces.
            UntraceableModel: torch cannot go on, or what runs depends on the content of tensors.
            ForwardFailed: the forward itself fails.
        """
        if capture_is_off():
            raise UntraceableModel(
                f"torch.compile is switched off ({CAPTURE_SWITCHES}), and a step is captured with "
                "it: switch it on, or train without a plan"
            )
        if self._hooks() != self._seen:
            self._forget()
        with ordinary_stance():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self._captured_once and self.whole:
                with suppress(*DYNAMO_ERRORS), self._where():  # a new graph: see below
                    return self._compiled(*args, **kwargs)
            self._on_meta = _on_meta(self._model)
            with dynamo_settings(recurrent=_is_recurrent(self._model)), self._where():
                self._captured_once = True
                return self._compiled(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            if recompile_limit_hit(error):  # too many graphs: those that exist are forgotten
                self._forget()
                return self._run(args, kwargs)
            reason = self._data or break_of(error)
            if forward_failed(error) or not self.whole or branches_on_data(reason):
                raise _explained(error) from error
            self.breaks.append(reason)
            self._compiled = self._compile(whole=False)
            raise GraphBreak(self.breaks[0]) from error
        except Exception:
            if not self.whole:
                forget_code(self._model)
            raise

    def _forget(self) -> None:
        """Captures everything again."""
        self._compiled = self._compile(whole=self.whole)
        self._captured_once = False
        self._watch()

    def _watch(self) -> None:
        """Looks at the hooks that there are, which a capture has in it."""
        self._hooks = hooks_of(self._model)
        self._seen = self._hooks()

    @contextmanager
    def _where(self) -> Iterator[None]:
        """A model on the meta device is always traced as if it lay on the CPU."""
        with layouts_as_run(), meta_as_cpu() if self._on_meta else nullcontext():
            yield

    def _compile(self, *, whole: bool) -> Callable[..., Any]:
        captured = not_holding(self._captured)

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return captured(module, inputs, whole=whole)

        # With `dynamic` left open, a size or a number that changes becomes a symbol.
        return torch.compile(_own_code(self._model), backend=backend, fullgraph=whole)

    def _captured(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, whole: bool
    ) -> Callable[..., Any]:
        """What runs in place of a graph that Dynamo has made."""
        self._watch()  # the modules may be others
        reason = break_after(module)
        known = {_place(b) for b in self.breaks}
        if reason and not whole and _place(reason) not in known:
            self.breaks.append(_acceptable(reason))
        self._data = depends_on_data(module)
        if self._data and whole:  # what costs depend on must be known before the step runs
            raise GraphBreak(self._data)
        return _compile_graph(module, inputs, self._make_executor)


def not_holding(method: Callable[P, R]) -> Callable[P, R]:
    """Calls a bound method while its object lives, and does not keep the object alive.

    For what torch is handed: Dynamo remembers backends for the life of the process, and what it
    compiled until the code object that was compiled is gone, which the same object holds.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = reference()
        assert bound is not None, "a planned forward runs, and its planner is gone"
        return bound(*args, **kwargs)

    return call


_WAY_OUT = (
    "Change the line that it names, or keep it out of the planned module. A branch on the content "
    "of a tensor leaves unknown which operations a step runs: compute both sides and choose with "
    "torch.where."
)


def _acceptable(reason: str) -> str:
    """The same break, unless a branch on data makes it: no plan holds for a step that is not known.

    Raises:
        UntraceableModel: it is such a branch.
    """
    if branches_on_data(reason):
        raise UntraceableModel(
            f"the model's forward branches on the content of a tensor at {reason}\n{_WAY_OUT}"
        )
    return reason


def _place(reason: str) -> str:
    """The "file:line" of a break; all of it where that is not known."""
    where = reason.partition(": ")[0]
    return reason if where == "unknown place" else where


def _on_meta(model: torch.nn.Module) -> bool:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return any(t.is_meta for t in tensors)


def _is_recurrent(model: torch.nn.Module) -> bool:
    return any(isinstance(m, torch.nn.RNNBase) for m in model.modules())


def _own_code(model: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls the model, with a code object and a name of its own.

    Dynamo keeps compiled graphs, and counts them against a limit, by code object, and remembers by
    file, line and name which sizes have changed: planned models must share neither.
    """

    def planned_forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # what `nn.Module.compile` compiles, too

    return types.FunctionType(
        planned_forward.__code__.replace(co_name=f"planned_forward_{next(_numbers)}"),
        planned_forward.__globals__,
        planned_forward.__name__,
        None,
        planned_forward.__closure__,
    )


def _compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], make_executor: ExecutorFactory
) -> Callable[..., Any]:
    captured: list[Executor] = []

    def partition(
        joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        arguments = [n for n in module.graph.nodes if n.op == "placeholder"]
        _tag_backward(joint)
        own_gradients(joint.graph, num_fwd_outputs)
        merge_views(joint.graph, num_fwd_outputs)
        # What Dynamo traced with: `inputs` are the real tensors, whose sizes are numbers.
        fakes = tuple(n.meta.get("example_value") for n in arguments)
        graph = JointGraph(joint, num_fwd_outputs, True, Symbols.of(fakes), fakes)
        one_to_one = len(graph.primals) == len(arguments) and not any(map(_has_parts, arguments))
        graph = dataclasses.replace(graph, one_to_one=one_to_one)
        captured.append(make_executor(graph))
        return _stand_in_forward(graph), _stand_in_backward(graph)

    def forward(_module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        return _boxed(captured[0].forward)

    def backward(_module: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        return _boxed(captured[0].backward)

    def inference(plain: fx.GraphModule, _inputs: Sequence[Any]) -> Boxed:
        return _boxed(lambda args: plain(*args))

    call = aot_joint(
        module,
        inputs,
        partition=partition,
        forward=forward,
        backward=backward,
        inference=inference,
    )
    return captured[0].wrap(call) if captured else call


def _tag_backward(joint: fx.GraphModule) -> None:
    """Marks what depends on tangents as backward; some passes of torch leave nodes untagged."""
    late: set[fx.Node] = set()
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if is_tangent or (node.op == "call_function" and late.intersection(node.all_input_nodes)):
            late.add(node)
            if node.op == "call_function":
                node.meta["partitioner_tag"] = BACKWARD


def _has_parts(argument: fx.Node) -> bool:
    """Whether an argument is a tensor made of others, such as a DTensor."""
    return hasattr(type(argument.meta.get("example_value")), "__tensor_flatten__")


def _boxed(function: Boxed) -> Boxed:
    """Marks a function as taking one list of arguments, which it may empty to free them."""

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's name for the convention
    return call


def _stand_in_forward(graph: JointGraph) -> fx.GraphModule:
    """Forward as AOTAutograd must see it: primals in, outputs and a token out.

    It is never run; AOTAutograd reads its outputs' metadata. The token is the only "saved tensor":
    its number links a backward call to the forward call that it belongs to.
    """
    stub = fx.Graph()
    env: dict[fx.Node, fx.Node] = {n: stub.node_copy(n) for n in graph.primals}
    outputs = []
    for item in graph.outputs:
        if isinstance(item, fx.Node) and item not in env:
            env[item] = _typed(stub, item.meta)
        outputs.append(env[item] if isinstance(item, fx.Node) else item)
    with no_fake_mode():
        token = torch.zeros((), dtype=torch.int64)
    fake_mode = next(
        (m for n in graph.primals if (m := getattr(n.meta.get("val"), "fake_mode", None))), None
    )
    token_val = fake_mode.from_tensor(token) if fake_mode is not None else token
    outputs.append(_typed(stub, {"val": token_val, "partitioner_tag": "is_forward"}))
    node = stub.output(tuple(outputs))
    node.meta.update(next(iter(graph.module.graph.find_nodes(op="output"))).meta)
    if "desc" in node.meta:
        node.meta["desc"] = [*node.meta["desc"][: graph.num_forward_outputs], None]
    return fx.GraphModule(torch.nn.Module(), stub)


def _stand_in_backward(graph: JointGraph) -> fx.GraphModule:
    """Backward as AOTAutograd must see it: token and tangents in, a gradient per primal out."""
    stub = fx.Graph()
    token = stub.placeholder("token")
    with no_fake_mode():
        token.meta["val"] = torch.zeros((), dtype=torch.int64)
    # Where there is such an operation AOTAutograd gives no saved tensor away for backward to
    # overwrite; the token would be one, and `retain_graph` be refused.
    stub.call_function(torch.ops.aten.set_.source_Tensor, (token, token))
    for tangent in graph.tangents:
        stub.node_copy(tangent)
    outputs = [
        _typed(stub, g.meta) if isinstance(g, fx.Node) else g for g in graph.backward_outputs
    ]
    stub.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), stub)


def _typed(stub: fx.Graph, meta: dict[str, Any]) -> fx.Node:
    """A node that stands for a result of this type."""
    node = stub.call_function(_never_run, ())
    node.meta.update(meta)
    return node


def _never_run() -> None:
    raise AssertionError("a stand-in graph was run")


def _explained(error: Exception) -> PlannerError:
    """torch's message, which names the reason and the user's file and line, under a headline."""
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    if forward_failed(error):
        return ForwardFailed(
            f"the model's forward fails for these inputs (example_inputs): {_failure(text)}"
        )
    return UntraceableModel(f"torch cannot trace the model's forward:\n{text}\n{_WAY_OUT}")


_RAISED = re.compile(r"(?:raised exception|got) (\w+\(.+\))")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.+)')
_MISMATCH = re.compile(r"(Expected all tensors to be on the same device.+)")
_FRAMES = 3  # of the forward, the innermost ones


def _failure(text: str) -> str:
    """What a forward raised, and where, out of Dynamo's message; all of it where that is not clear.

    Frames of torch's own modules are left out where there are others, and its advice to people who
    compile always.
    """
    raised = _RAISED.findall(text) or _MISMATCH.findall(text)
    frames = [f for f in _FRAME.findall(text) if f[0] != __file__]
    frames = [f for f in frames if "/torch/" not in f[0]] or frames
    if not raised or not frames:
        return "\n" + text
    lines = [f"  {file}:{line} in {name}: {code}" for file, line, name, code in frames[-_FRAMES:]]
    return "\n".join([raised[-1], *lines])
