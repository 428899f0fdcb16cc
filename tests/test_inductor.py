"""Programs lowered by Inductor: the same schedule, saved set, random numbers and gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runtime.lowering
from planner import Plan, plan
from planner.backends import INDUCTOR
from runtime import measure
from runtime.lowering import Lowered
from runtime.rewrite import Rewritten, graph_of
from runtime.torch_private import decomposed, fake_mode_of, inductor_compile
from tests.models import Perceptron
from tests.test_training import gradients, tight
from tracer.errors import PlannerError


def made_for(model: nn.Module, x: Any, fraction: float = 0.0) -> Plan:
    wide = plan(model, x, budget_gb=1000, backend=INDUCTOR)
    assert isinstance(wide, Plan)
    budget = wide.minimum_peak_bytes + fraction * (wide.peak_bytes - wide.minimum_peak_bytes)
    found = plan(model, x, budget_gb=budget / 1e9, backend=INDUCTOR)
    assert isinstance(found, Plan)
    return found


def rewritten_of(made: Plan) -> Rewritten:
    engine = made._engine
    assert engine is not None
    ((_, program),) = engine.programs_of(made)
    return program.rewritten


def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def test_dropout_replays_the_mask_of_eager_mode() -> None:
    """Random operators stay eager mode's: the same seed gives the same loss, bit by bit nearly."""
    torch.manual_seed(0)
    model, x = Perceptron(64, 4, dropout=0.2), torch.randn(512, 64)
    eager = train_step(model, x)
    expected = gradients(model)
    made = made_for(model, x)
    assert any("dropout" in r.op for r in made.recomputed)
    made.apply()
    loss, found = train_step(model, x), gradients(model)
    state = torch.get_rng_state()
    made.remove()
    torch.testing.assert_close(loss, eager)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    train_step(model, x)
    assert torch.equal(state, torch.get_rng_state())


def test_saved_set_and_peak_survive_lowering() -> None:
    """What lives from forward to backward is what the plan says, and the peak keeps to it."""
    torch.manual_seed(0)
    model, x = Perceptron(64, 8, dropout=0.2), torch.randn(2048, 64)
    made = made_for(model, x, 0.3)
    made.apply()
    train_step(model, x)
    model.zero_grad(set_to_none=True)
    kept: list[int] = []

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(x).square().mean().backward()

    def note(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.untyped_storage().data_ptr())
        return t

    measured = measure(step, model=model, inputs=x)
    assert measured.peak_bytes <= made.budget_bytes
    rewritten = rewritten_of(made)
    parts = [rewritten.forward, *(s.function for s in rewritten.slices)]
    assert all(isinstance(part, Lowered) for part in parts)
    assert len(set(kept)) >= len(rewritten.saved) > 0
    made.remove()


def test_few_slices() -> None:
    """Every slice is compiled, so gradients leave in a few lots."""
    model, x = Perceptron(64, 20), torch.randn(32, 64)
    made = made_for(model, x, 0.5)
    assert made.graph.few_slices
    assert 1 < len(rewritten_of(made).slices) <= 9


def test_what_inductor_cannot_lower_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no C++ compiler")

    model, x = Perceptron(16, 4), torch.randn(8, 16)
    made = made_for(model, x, 0.5)
    monkeypatch.setattr(runtime.lowering, "inductor_compile", broken)
    made.apply()
    with pytest.raises(PlannerError, match=r"Inductor cannot lower .*no C\+\+ compiler.*eager"):
        model(x)
    made.remove()
    train_step(model, x)


def test_values_of_another_dtype_are_refused() -> None:
    """Compiled code would read their bytes as something else."""
    model, x = Perceptron(16, 4), torch.randn(8, 16)
    made = made_for(model, x, 0.5)
    lowered = rewritten_of(made).forward
    graph = graph_of(lowered)
    wrong = [n.meta["val"].shape for n in graph.graph.find_nodes(op="placeholder")]
    with pytest.raises(PlannerError, match=r"float64.*float32.*backend='eager'"):
        lowered.forward([torch.zeros(shape, dtype=torch.float64) for shape in wrong])


def test_lowering_under_autocast() -> None:
    """The casts of the caller's autocast stand in the graph, once."""
    torch.manual_seed(0)
    model, x = Perceptron(64, 4), torch.randn(256, 64)
    exact, double = copy.deepcopy(model).double(), x.double()
    exact(double).square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        made = made_for(model, x)
        made.apply()
        loss = model(x).square().mean()
    loss.backward()
    made.remove()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.dtype == torch.float32
        off = (p.grad.double() - q.grad).norm() / q.grad.norm()
        assert off < 2e-2


def test_a_plan_file_knows_its_backend(tmp_path: Path) -> None:
    model, x = Perceptron(32, 6), torch.randn(64, 32)
    made = made_for(model, x)
    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json", model)
    assert read.backend == INDUCTOR
    expected = train_step(model, x)
    read.apply()
    torch.testing.assert_close(train_step(model, x), expected)
    read.remove()
    eager = tight(model, x, 0.0)
    assert eager.backend == "eager"


def test_fused_chains_cost_one_pass() -> None:
    """A chain of element-wise operations moves the bytes at its ends; matmuls cost the same."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(((y + 1).abs() + 2) * 3)  # type: ignore[no-any-return]

    model, x = Chain(), torch.randn(4096, 64)
    times: dict[str, dict[str, int]] = {}
    for backend in ("eager", INDUCTOR):
        made = plan(model, x, budget_gb=1, backend=backend, hardware="a100-80gb")
        assert isinstance(made, Plan)
        times[backend] = {op.name: op.time_ns for op in made.graph.operations if op.is_forward}
    one, other = times["eager"], times[INDUCTOR]
    assert other["addmm"] == one["addmm"]
    assert other["add_1"] == 0  # between two fused neighbours, and backward does not read it
    assert 0 < other["mul"] < one["mul"]
    assert sum(other.values()) < sum(one.values())


def test_a_sum_of_many_products_waits_for_all_of_them() -> None:
    """One kernel adds them all up: while the last sum is made, all of the products are there."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.parts[0](x)
            for part in self.parts[1:]:
                total = total + part(x)
            return total  # type: ignore[no-any-return]

    x = torch.randn(4096, 64)
    made = plan(Sum(), x, budget_gb=1, backend=INDUCTOR, hardware="a100-80gb")
    assert isinstance(made, Plan)
    sums = [op for op in made.graph.operations if op.is_forward and op.name.startswith("add")]
    assert len(sums) == 9
    # The schedule holds one product and the sum so far; the others wait, less that sum's room.
    assert sums[-1].workspace == 8 * x.nbytes


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 16), nn.BatchNorm2d(16)])
def test_a_norms_backward_has_room_for_float32_in_between(norm: nn.Module) -> None:
    """What it reads once for its sums and once for its result is written as it was computed."""
    model, x = nn.Sequential(nn.Conv2d(3, 16, 1), norm, nn.SiLU()), torch.randn(4, 3, 32, 32)
    held = {}
    for backend in ("eager", INDUCTOR):
        with torch.autocast("cpu", torch.bfloat16):
            made = plan(model, x, budget_gb=1, backend=backend, hardware="a100-80gb")
        assert isinstance(made, Plan)
        (own,) = (o for o in made.graph.operations if "norm_backward" in o.name)
        held[backend] = own.workspace
    assert held[INDUCTOR] == held["eager"] + 2 * 4 * (4 * 16 * 32 * 32)


def test_unrelated_loops_do_not_wait_for_each_other() -> None:
    """In one function, buffers of all loops up to the next convolution would be there at once."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
            self.norm, self.pool = nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1)
            self.last = nn.Conv2d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.pool(torch.relu(self.norm(self.first(x)))))

    torch.manual_seed(0)
    model, x = Stem(), torch.randn(4, 3, 64, 64)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    eager = plan(model, x, budget_gb=1)
    made = plan(model, x, budget_gb=1, backend=INDUCTOR)
    made.apply()

    def step() -> None:
        model(x).square().mean().backward()

    step()
    assert measure(step, model, inputs=x).peak_bytes <= eager.peak_bytes


def test_nothing_is_fused_over_a_kernel_in_between() -> None:
    """Two readers of one input would share a loop, and the later one's result wait for its use."""

    def chain(x: torch.Tensor, wide: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        return ((torch.relu(x) @ wide) @ back) @ torch.exp(x)

    inputs = [0.1 * torch.randn(size) for size in ((64, 64), (64, 256), (256, 64))]
    mode = fake_mode_of([])
    fakes = [mode.from_tensor(t) for t in inputs]
    lowered = inductor_compile(decomposed(lambda *given: [chain(*given)], fakes), fakes)
    (found,) = lowered(list(inputs))
    torch.testing.assert_close(found, chain(*inputs))
    held = [
        measure(call, inputs=inputs).peak_bytes
        for call in (lambda: chain(*inputs), lambda: lowered(list(inputs)))
    ]
    assert held[1] <= held[0]
