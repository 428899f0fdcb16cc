"""What each of two processes runs for `test_distributed.py`, started by torchrun.

Every check is a function; what it returns is gathered from all ranks and written as JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples import ddp, fsdp2, pipeline, tensor_parallel
from examples.transformer import Decoder
from planner import InfeasibleBudget, Plan, PlannerError, plan
from runtime import measure

FAST: dict[str, Any] = {"hardware": "cpu", "solver": "greedy"}


class Tied(nn.Module):
    """A tied weight, a parameter that nothing uses, one block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(64, 32), nn.Linear(32, 4)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.out = nn.Linear(32, 64, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        for _ in range(3):
            h = h + self.body(h)
        return F.cross_entropy(self.out(h).flatten(0, 1), ids.flatten())


def tokens(batch: int = 16, high: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randint(0, high, (batch, 32), generator=generator)


def tight(model: nn.Module, batch: Any, part: float = 0.5) -> Plan:
    wide = plan(model, (batch,), budget_gb=1000, **FAST)
    assert isinstance(wide, Plan)
    budget = wide.baseline_peak_bytes - part * wide.baseline_saved_bytes
    made = plan(model, (batch,), budget_gb=max(budget, wide.minimum_peak_bytes) / 1e9, **FAST)
    assert isinstance(made, Plan)
    return made


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None or not a.any()) and (b is None or not b.any())
        if a is None or b is None
        else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def wrapped(order: str, views: bool) -> dict[str, Any]:
    """Gradients and peak under DDP, in both wrap orders."""
    torch.manual_seed(0)
    plain, batch = Tied(), tokens()
    model = copy.deepcopy(plain)
    settings: Any = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    reference = DistributedDataParallel(plain, **settings)
    if order == "planned first":
        tight(model, batch, 0.3).apply()
        planned = DistributedDataParallel(model, **settings)
        shown: Any = model.plan
        engine = shown._engine
        engine.request = _with_room(engine.request, model)
        budget = engine.request.budget_bytes
    else:
        planned = DistributedDataParallel(model, **settings)
        made = tight(planned, batch)
        made.apply()
        budget = made.budget_bytes
    same = True
    for _ in range(3):
        for each in (reference, planned):
            each.zero_grad()
            each(batch).backward()
        same &= equal(gradients(plain), gradients(model))
    planned.zero_grad()
    found = measure(lambda: planned(batch).backward(), model=planned, inputs=batch)
    buckets = sum(p.nbytes for p in model.parameters())
    made_for: Any = model.plan
    return {
        "same": same,
        "recomputed": len(made_for.recomputed),
        "peak": found.peak_bytes + buckets,
        "budget": budget,
        "buckets": dict(made_for.breakdown).get("gradient buckets", 0),
    }


def _with_room(request: Any, model: nn.Module) -> Any:
    """The same request, with room for the buckets that were not there when it was made."""
    buckets = sum(p.nbytes for p in model.parameters())
    return dataclasses.replace(request, budget_bytes=request.budget_bytes + buckets)


def overlap() -> dict[str, Any]:
    """Buckets are reduced while the backward pass still runs."""
    torch.manual_seed(0)
    events: list[str] = []
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    first: Any = model[0]
    planned = DistributedDataParallel(model, bucket_cap_mb=0.04)
    batch = torch.randn(8, 64)
    made = plan(planned, (batch,), budget_gb=1, **FAST)
    assert isinstance(made, Plan)
    made.apply()

    def reduce(state, bucket):  # DDP checks annotations, and knows these by no name
        events.append("reduce")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    planned.register_comm_hook(None, reduce)
    first.weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    for _ in range(2):
        events.clear()
        planned(batch).square().sum().backward()
    return {"before": events.index("first layer"), "buckets": events.count("reduce")}


def other_cache() -> dict[str, Any]:
    """Rank 1 measures by itself, into an empty cache; both use one plan."""
    if dist.get_rank():
        os.environ["CHECKPOINT_PLANNER_CACHE"] = tempfile.mkdtemp()
    torch.manual_seed(0)
    model, batch = Tied(), tokens()
    made = plan(model, (batch,), budget_gb=1, solver="greedy")
    assert isinstance(made, Plan)
    budget = (made.minimum_peak_bytes + made.baseline_peak_bytes) / 2e9
    made = plan(model, (batch,), budget_gb=budget, solver="greedy")
    assert isinstance(made, Plan)
    return {"order": list(made.order), "step_ns": made.step_ns, "recomputed": len(made.recomputed)}


def infeasible() -> dict[str, Any]:
    try:
        plan(Tied(), (tokens(),), budget_gb=1e-5, **FAST)
    except InfeasibleBudget as error:
        return {"minimum": error.minimum_bytes}
    return {}


def uneven() -> dict[str, Any]:
    """Ranks see other shapes, at other times: nobody waits for a plan that nobody makes."""
    torch.manual_seed(0)
    plain = Tied()
    planned = DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)
    reference = DistributedDataParallel(plain, find_unused_parameters=True)
    plan(planned, (tokens(),), budget_gb=1, **FAST).apply()
    same = True
    for step in range(3):
        batch = tokens(16 - 3 * step * dist.get_rank())
        for each in (reference, planned):
            each.zero_grad()
            each(batch).backward()
        same &= equal(gradients(reference), gradients(planned))
    return {"same": same}


def sharded_after() -> dict[str, Any]:
    """`fully_shard` on a module that has a plan already; gradients accumulate without reduction."""
    torch.manual_seed(0)
    batch = tokens(8, 512)
    models: list[Any] = [Decoder(hidden=32, layers=2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plan(models[1], (batch,), budget_gb=0.1, **FAST).apply()
    same = True
    for model in models:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    for _ in range(2):
        for model in models:
            model.zero_grad()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(batch).backward()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        same &= all(torch.equal(_local(p), _local(q)) for p, q in pairs)
    shown: Any = models[1].plan
    return {"same": same, "pieces": len(shown.pieces), "held": dict(shown.pieces[0].breakdown)}


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.grad.to_local()
    return local


def refusals() -> dict[str, Any]:
    flat: Any = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # needs a GPU to be made
    nn.Module.__init__(flat)
    said = {}
    for name, model in {
        "fsdp1": nn.Sequential(nn.Linear(4, 4), flat),
        "dp": nn.DataParallel(nn.Linear(4, 4)),
    }.items():
        try:
            plan(model, (torch.randn(2, 4),), budget_gb=1, **FAST)
        except PlannerError as error:
            said[name] = str(error)
    return said


def example(main: Callable[..., None]) -> dict[str, Any]:
    main(hardware="cpu", time_limit=1)  # "greedy" alone would miss some of the budgets
    return {}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp first": lambda: wrapped("ddp first", False),
    "ddp first, views": lambda: wrapped("ddp first", True),
    "planned first": lambda: wrapped("planned first", False),
    "overlap": overlap,
    "other cache": other_cache,
    "infeasible": infeasible,
    "uneven": uneven,
    "sharded after": sharded_after,
    "refusals": refusals,
    "example ddp": lambda: example(ddp.main),
    "example tensor_parallel": lambda: example(tensor_parallel.main),
    "example fsdp2": lambda: example(fsdp2.main),
    "example pipeline": lambda: example(pipeline.main),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, list[Any]] = {}
    for name in sys.argv[2:] or list(CHECKS):
        try:
            mine: Any = CHECKS[name]()
        except BaseException:
            mine = {"error": traceback.format_exc()}
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, mine)
        results[name] = rows
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort in the interpreter's teardown


if __name__ == "__main__":
    main()
