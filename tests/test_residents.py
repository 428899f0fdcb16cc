from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from planner import Plan, plan
from tracer.allocator import cuda_bytes
from tracer.errors import PlannerError
from tracer.hardware import load_profile
from tracer.residents import optimizer_step_bytes, resident_bytes
from tracer.roofline import RooflineCosts

BYTES = (100 * 200 + 200 * 50) * 4
LARGEST = 100 * 200 * 4


def net(device: str = "cpu") -> nn.Sequential:
    linear = functools.partial(nn.Linear, bias=False, device=device)
    return nn.Sequential(linear(100, 200), linear(200, 50))


def held(model: nn.Module, inputs: object = (), optimizer: Any = None) -> dict[str, int]:
    return dict(resident_bytes(model, inputs, optimizer))


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    return model


def test_each_kind_is_counted():
    linear = nn.Linear(8, 8)
    linear.weight.grad = torch.zeros(8, 8)
    model = nn.Sequential(linear, nn.BatchNorm1d(8))
    found = resident_bytes(model, {"x": torch.rand(3, 8), "y": [torch.rand(5), 7]})
    assert found == (
        ("parameters", (64 + 8 + 8 + 8) * 4),
        ("buffers", 2 * 8 * 4 + 8),
        ("gradients", 64 * 4),
        ("inputs", (24 + 5) * 4),
    )


def test_storages_count_once():
    one, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    other.weight = one.weight
    model = nn.Sequential(one, other)
    model.register_buffer("view", one.weight.detach()[:2])
    assert held(model, (one.weight,)) == {"parameters": 256}


def test_a_part_of_a_storage_holds_all_of_it():
    class Batch(NamedTuple):
        x: torch.Tensor

    assert held(nn.Identity(), Batch(torch.rand(100)[:1])) == {"inputs": 400}


def test_allocators_round_up():
    assert resident_bytes(nn.Linear(3, 5), (), allocated=cuda_bytes) == (("parameters", 1024),)


def test_a_model_that_has_no_memory_yet():
    assert held(net("meta"), (), torch.optim.AdamW)["parameters"] == BYTES


STATES = [
    (torch.optim.AdamW, 2 * BYTES + 8),
    (functools.partial(torch.optim.AdamW, fused=True), 2 * BYTES + 8),
    (functools.partial(torch.optim.AdamW, amsgrad=True), 3 * BYTES + 8),
    (functools.partial(torch.optim.SGD, lr=0.1), 0),
    (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), BYTES),
    (torch.optim.Adafactor, (200 + 100 + 50 + 200) * 4 + 8),
    (torch.optim.Adagrad, BYTES + 8),
    (torch.optim.RMSprop, BYTES + 8),
]


@pytest.mark.parametrize(("make", "nbytes"), STATES)
def test_the_state_that_an_optimizer_will_have(make, nbytes):
    model = with_gradients(net())
    predicted = held(model, (), make).get("optimizer state", 0)
    optimizer = make(model.parameters())
    from_instance = held(model, (), optimizer).get("optimizer state", 0)
    optimizer.step()
    assert predicted == from_instance == held(model, (), optimizer).get("optimizer state", 0)
    assert predicted == nbytes


def test_state_counts_for_trainable_parameters_only():
    model = net()
    next(model.parameters()).requires_grad_(False)
    assert held(model, (), torch.optim.AdamW)["optimizer state"] == 2 * 200 * 50 * 4 + 4


def test_state_that_exists_in_part():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    first = next(model.parameters())
    first.grad = torch.zeros_like(first)
    optimizer.step()
    assert held(model, (), optimizer)["optimizer state"] == 2 * BYTES + 8


def test_predicting_leaves_the_optimizer_alone():
    model = with_gradients(net())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("stepped"))
    groups, gradients = optimizer.param_groups, [p.grad for p in model.parameters()]
    held(model, (), optimizer)
    optimizer_step_bytes(model, optimizer)
    assert optimizer.param_groups is groups and not optimizer.state
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert groups[0]["params"] == list(model.parameters())


@pytest.mark.parametrize(
    ("make", "cpu", "cuda"),
    [
        (torch.optim.AdamW, 2 * LARGEST, BYTES),  # one parameter at a time; all at once
        (functools.partial(torch.optim.AdamW, fused=True), 0, 0),
        (functools.partial(torch.optim.AdamW, foreach=True), BYTES, BYTES),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0, 0),
    ],
)
def test_temporaries_of_the_step(make, cpu, cuda):
    model = net("meta")
    slack = 64  # numbers on the CPU
    assert cpu <= optimizer_step_bytes(model, make, torch.device("cpu")) <= cpu + slack
    assert cuda <= optimizer_step_bytes(model, make, torch.device("cuda")) <= cuda + slack


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_be_predicted(make):
    with pytest.raises(PlannerError, match=rf"optimizer=: the state of {make.__name__} cannot"):
        held(net(), (), make)


def test_adding_to_gradients_that_exist_takes_time() -> None:
    """Autograd adds each of them in place, which is priced as that very operator is."""
    model, x = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 64)), torch.randn(4, 2048)
    steps = []
    for _ in range(2):
        made = plan(model, x, budget_gb=1, hardware="a100-80gb")
        assert isinstance(made, Plan)
        steps.append(made.step_ns)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    costs, graph, expected = RooflineCosts(load_profile("a100-80gb")), fx.Graph(), 0
    for p in model.parameters():
        held, new = graph.placeholder("held"), graph.placeholder("new")
        held.meta["val"] = new.meta["val"] = p.detach()
        call = graph.call_function(torch.ops.aten.add_.Tensor, (held, new))
        call.meta["val"] = p.detach()
        expected += costs.cost(call).time_ns
    assert steps[1] - steps[0] == expected > 3 * 4 * 2048 * 2048 / 2039
