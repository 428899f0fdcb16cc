"""The call with which autograd adds a gradient to one that exists.

It stands in no captured graph: `AccumulateGrad` makes it, for each parameter, when gradients are
kept from step to step. It reads two tensors and writes one of them, which for a large model takes
some percent of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx


def additions(gradients: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each gradient the call that adds it, in a graph of their own."""
    graph, found = fx.Graph(), {}
    for gradient in gradients:
        val = gradient.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
            continue
        held, new = graph.placeholder("held"), graph.placeholder("new")
        held.meta["val"] = new.meta["val"] = val
        call = graph.call_function(torch.ops.aten.add_.Tensor, (held, new))
        call.meta["val"] = val
        found[gradient] = call
    return found
