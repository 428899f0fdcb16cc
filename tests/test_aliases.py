"""Views that look alike are made once, and every reader still gets the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from planner.engine import Engine
from planner.request import Inputs, Request
from tests.models import bert
from tracer.aliases import merge_views
from tracer.operators import aliased_input

CPU = torch.device("cpu")
aten = torch.ops.aten
View = Callable[[torch.Tensor], torch.Tensor]


def flat(x: torch.Tensor) -> torch.Tensor:
    return aten.view.default(x, [x.numel()]) if x.is_contiguous() else x


def paired(x: torch.Tensor) -> torch.Tensor:
    fits = x.is_contiguous() and x.numel() % 2 == 0
    return aten.view.default(x, [2, x.numel() // 2]) if fits else x


VIEWS: dict[str, View] = {
    "flat": flat,
    "paired": paired,
    "swap": lambda x: aten.transpose.int(x, 0, -1),
    "lift": lambda x: aten.unsqueeze.default(x, 0),
    "lower": lambda x: aten.squeeze.default(x),
    "same": lambda x: aten.expand.default(x, list(x.shape)),
    "wider": lambda x: aten.expand.default(aten.unsqueeze.default(x, 0), [3, *x.shape]),
    "end": lambda x: aten.slice.Tensor(x, 0, x.shape[0] // 2, x.shape[0]),
    "part": lambda x: aten.split.Tensor(x, max(1, x.shape[0] // 2))[-1],
    "bits": lambda x: aten.view.dtype(x, torch.int32 if x.is_floating_point() else torch.float32),
    "base": lambda x: x,
}
chains = st.lists(st.lists(st.sampled_from(sorted(VIEWS)), max_size=4), min_size=1, max_size=5)


def following(chain: list[str], x: torch.Tensor) -> torch.Tensor:
    for name in chain:
        if x.dim() or name in ("flat", "lift", "bits", "base"):
            x = VIEWS[name](x)
    return x


def shown(result: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(r.dtype, r.shape, r.stride(), r.storage_offset(), r.tolist()) for r in result]


def results(module: fx.GraphModule) -> Any:
    return next(iter(module.graph.find_nodes(op="output"))).args[0]


def views_in(graph: fx.Graph) -> int:
    return sum(n.op == "call_function" and aliased_input(n) is not None for n in graph.nodes)


@given(chains)
def test_readers_get_the_same_tensor(chains: list[list[str]]) -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        ends = [following(chain, x) for chain in chains]
        return [ends[0], *(aten.clone.default(e) for e in ends), *ends]

    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    module = make_fx(step, tracing_mode="fake")(x)
    before, count, kept = shown(module(x)), views_in(module.graph), results(module)[0]
    merge_views(module.graph, num_forward_outputs=1)
    module.recompile()
    module.graph.lint()
    assert shown(module(x)) == before
    assert results(module)[0] is kept
    assert views_in(module.graph) <= count


def test_a_chain_that_leads_back_is_gone() -> None:
    def step(w: torch.Tensor) -> list[torch.Tensor]:
        there = aten.t.default(aten.view.default(w, [2, 6]))
        back = aten.view.default(aten.t.default(there), [3, 4])
        return [aten.mul.Tensor(back, 2), aten.view.default(back, [12])]

    module = make_fx(step, tracing_mode="fake")(torch.ones(3, 4))
    merge_views(module.graph, num_forward_outputs=0)
    assert views_in(module.graph) == 1  # the one that leaves in a shape of its own


def test_a_conjugate_is_not_what_it_is_a_view_of() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [aten.mul.Tensor(aten._conj.default(x), aten._conj.default(aten._conj.default(x)))]

    x = torch.tensor([1 + 2j, 3 - 1j])
    module = make_fx(step, tracing_mode="fake")(x)
    merge_views(module.graph, num_forward_outputs=0)
    module.recompile()
    assert torch.equal(module(x)[0], step(x)[0])
    assert views_in(module.graph) == 1


def test_what_an_operator_writes_to_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(aten.view.default, (x, [6])) for _ in range(2))
    written = graph.call_function(aten.copy_.default, (second, first))
    graph.output([written])
    for node in (x, first, second, written):
        node.meta["val"] = torch.ones(6) if node is x else x.meta["val"].view(6)
    merge_views(graph, num_forward_outputs=0)
    assert written.args == (second, first)


def test_a_linear_layer_is_transposed_twice() -> None:
    """Its weight in forward and the tangent in backward; torch transposes three results again."""
    model, batch = bert()
    joint = Engine(model, Request(None, None, CPU)).trace(Inputs((), batch)).joint
    made = sum(n.target is aten.t.default for n in joint.module.graph.nodes)
    assert made == 2 * sum(isinstance(m, torch.nn.Linear) for m in model.modules())
