"""The border of a captured step: outputs and inputs over one memory, hooks, partial backwards.

What autograd does there with a planned module is what it does with the plain one, to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from planner import Plan, UntraceableModel, plan
from tests.models import Perceptron


def planned(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """A copy that makes everything again that it can."""
    model = copy.deepcopy(model)
    made = plan(model, inputs, budget_gb=1, recompute="*")
    assert isinstance(made, Plan) and made.recomputed
    return made.apply()


def wide(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """A copy that makes nothing again."""
    model = copy.deepcopy(model)
    made = plan(model, inputs, budget_gb=1)
    assert isinstance(made, Plan) and not made.recomputed
    return made.apply()


def assert_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    assert (one is None) == (other is None)
    assert one is None or other is None or torch.equal(one, other)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_equal(p.grad, q.grad)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def whole_numbers() -> torch.Tensor:
    """Sums of these do not depend on the order."""
    return torch.randint(-3, 4, (4, 4)).float()


class Outputs(nn.Module):
    """Returns views of its input, of a weight, and of a result, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_numbers())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ self.weight).relu()
        views = self.weight.t(), *self.weight.unbind(), *x.split(3), x.expand(2, 4, 4)
        return y, y.t().t(), y.view(2, 8).view(4, 4), x.view(16), *views, y.sum()


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "views of results": lambda y, again, reshaped, *_: (again * reshaped).sum(),
    "view of a weight": lambda *outputs: outputs[4].square().sum(),
    "view of an input": lambda *outputs: outputs[3].square().sum(),
    "one of several views": lambda *outputs: (outputs[6] * outputs[9]).sum(),
    "all": lambda y, *more: y.sum() + sum(m.square().sum() for m in more),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_that_are_views_are_as_before(loss: str) -> None:
    torch.manual_seed(0)
    plain, inputs = Outputs(), whole_numbers()
    gradients = []
    for model in (plain, wide(plain, inputs.clone().requires_grad_())):
        x = inputs.clone().requires_grad_()
        outputs = model(x)
        assert len({o.data_ptr() for o in outputs[:3]}) == 1
        assert outputs[3].data_ptr() == x.data_ptr()
        assert outputs[4].data_ptr() == model.weight.data_ptr()
        for _ in range(2):
            LOSSES[loss](*outputs).backward(retain_graph=True)
        gradients.append((x.grad, model.weight.grad))
    for theirs, ours in zip(*gradients, strict=True):
        assert_equal(theirs, ours)


class Chain(nn.Module):
    """Layers whose weight gradients are large enough for a slice each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(520, 520, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        first: Any = self.layers[0]
        return (x @ first.weight).square().mean()


@pytest.mark.parametrize("make", [wide, planned])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_hook_may_change_a_parameter(make: Callable[..., nn.Module], accumulate: bool) -> None:
    """An optimizer's step as soon as the gradient is there; backward still reads other weights."""

    @torch.no_grad()
    def step(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.5)
        p.grad = torch.zeros_like(p) if accumulate else None

    torch.manual_seed(0)
    plain, x = Chain(), torch.randn(64, 520)
    if accumulate:
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
    ours = make(plain, x)
    for model in (plain, ours):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(x).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)


class ReadLate(nn.Module):
    """The first weight's gradient is there first, and the weight is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = (nn.Parameter(torch.randn(520, 520) / 30) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(torch.tanh(x @ self.a) @ self.w.detach())
        return torch.tanh(torch.tanh(h @ self.b) @ self.w)


@pytest.mark.parametrize("make", [wide, planned])
def test_a_gradient_that_waits_for_later_slices(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain, x = ReadLate(), torch.randn(64, 520)
    ours, left = make(plain, x), []
    for name, p in ours.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: left.append(name))
    for model in (plain, ours):
        for _ in range(2):
            model(x).sum().backward()
    assert_same_gradients(plain, ours)
    assert left == ["b", "w", "a"] * 2  # in eager mode w's would be the first


class Sines(nn.Module):
    """`end(y, h, x, w)` is what it returns beside its result y."""

    def __init__(self, end: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) / 4)
        self.v = nn.Parameter(torch.randn(32, 32) / 4)
        self.end = end

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h = torch.tanh(x @ self.w).sin() @ self.v
        y = torch.tanh(h).cos()
        return y, self.end(y, h, x, self.w)


def raising(_: Any) -> None:
    raise KeyError


def backward_of_some(how: str, model: Any, y: torch.Tensor) -> None:
    match how:
        case "inputs":
            y.sum().backward(inputs=[model.v])
        case "inputs, kept":
            y.sum().backward(inputs=[model.v], retain_graph=True)
        case "grad":
            torch.autograd.grad(y.sum(), [model.v], retain_graph=True)
        case "raises":
            hook = model.v.register_hook(raising)
            with pytest.raises(KeyError):
                y.sum().backward(retain_graph=True)
            hook.remove()
            model.zero_grad()


@pytest.mark.parametrize("how", ["inputs", "inputs, kept", "grad", "raises"])
def test_what_a_partial_backward_leaves_is_not_the_next_ones(how: str) -> None:
    torch.manual_seed(0)
    plain, x = Sines(lambda y, h, x, w: w.t()), torch.randn(128, 32)
    ours = planned(plain, x)
    for model in (plain, ours):
        y, turned = model(x)
        backward_of_some(how, model, y)
        turned.sum().backward()
    assert_same_gradients(plain, ours)


@pytest.mark.parametrize("view", [lambda h: h.view(-1), lambda h: h[1:], lambda h: h.t()])
def test_an_output_that_is_kept_must_not_change(view: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 32)
    y, seen = planned(Sines(lambda y, h, x, w: view(h)), x)(x)
    with torch.no_grad():
        seen.mul_(0.5)
    with pytest.raises(RuntimeError, match="clone the output before you change it"):
        y.sum().backward()


@pytest.mark.parametrize("changed", ["output", "input"])
def test_an_output_and_an_input_over_one_memory(changed: str) -> None:
    """Autograd knows that they are, so a change of one is a change of the other."""
    torch.manual_seed(0)
    plain, start = Sines(lambda y, h, x, w: x.view(-1)), torch.randn(128, 32)
    gradients = []
    for model in (plain, planned(plain, start.clone().requires_grad_())):
        first = start.clone().requires_grad_()
        x = first * 1
        y, flat = model(x)
        y.sum().backward(retain_graph=True)
        (flat if changed == "output" else x).mul_(3)
        (x if changed == "output" else flat).sum().backward()
        gradients.append(first.grad)
        with pytest.raises(RuntimeError, match="view of a leaf"):
            model(leaf(128, 32))[1].mul_(3)
    assert_equal(*gradients)


def test_an_output_that_is_an_input_is_the_same_object() -> None:
    model = planned(Sines(lambda y, h, x, w: (x.contiguous(), w)), leaf(128, 32))
    x = leaf(128, 32)
    again, weight = model(x)[1]
    assert again is x and weight is model.w


def test_a_view_of_what_is_detached_needs_no_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 32)
    _, seen = planned(Sines(lambda y, *_: y.detach()[:5]), x)(x)
    assert not seen.requires_grad


class Doubles(torch.autograd.Function):
    """Somebody's own function; it is told of a missing gradient by zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: Any, two: Any) -> Any:
        return 100 * one if two is None else one + 2 * two


def test_nodes_of_other_people_are_left_alone() -> None:
    torch.manual_seed(0)

    class Beside(Sines):
        def forward(self, x: torch.Tensor, a: torch.Tensor) -> Any:  # type: ignore[override]
            return *super().forward(x), a.view(-1)

    plain, x = Beside(lambda *_: None), torch.randn(128, 32)
    gradients = []
    for model in (plain, planned(plain, x, leaf(4, 4) * 1)):
        first = torch.ones(4, 4, requires_grad=True)
        y, _, flat = model(x, Doubles.apply(first)[0])
        (y.sum() + flat.sum()).backward()
        gradients.append(first.grad)
    assert_equal(*gradients)


class Added(nn.Module):
    """Gradients that no operation of the backward pass makes."""

    def __init__(self, end: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(32, 32), end
        self.scalar, self.full = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(128, 32))

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return self.end(torch.tanh(torch.tanh(self.layer(x)).sin()).cos(), self, r)


class Saved(torch.autograd.Function):
    """Its second gradient is a value of the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return g, kept, None


ENDS: dict[str, Callable[..., torch.Tensor]] = {
    "scalar": lambda y, m, r: y.sum() + m.scalar,
    "sum": lambda y, m, r: y.sum() + m.full.sum(),
    "full": lambda y, m, r: y + m.full,
    "input": lambda y, m, r: y + r,
    "both": lambda y, m, r: y + r + m.full,
    "saved": lambda y, m, r: Saved.apply(y, m.full, y.detach()),
    "own": lambda y, m, r: Saved.apply(y, m.full, r),
}


@pytest.mark.parametrize("make", [wide, planned])
@pytest.mark.parametrize("end", ENDS)
def test_gradients_that_no_operation_makes(end: str, make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain, x, r = Added(ENDS[end]), torch.randn(128, 32), leaf(128, 32)
    ours = make(plain, x, r)
    gradients = []
    for model in (plain, ours):
        for _ in range(2):  # the second adds to what is there
            model(x, r).sum().backward()
        gradients.append(r.grad)
        r.grad = None
    assert_same_gradients(plain, ours)
    assert_equal(*gradients)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.one(x)).sin(), torch.tanh(self.other(x)).sin()


def test_hooks_of_a_parameter_without_gradient_are_called_with_none() -> None:
    """Not as in eager mode, which calls none of them; there is no gradient all the same."""
    torch.manual_seed(0)
    x = torch.randn(128, 32)
    model, seen = planned(Heads(), x), []
    weight = model.other.weight
    weight.register_hook(lambda g: seen.append(g))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(x)[0].sum().backward()
    assert seen == [None, None] and weight.grad is None


class Unasked(torch.autograd.Function):
    """Says that it wants None for what does not arrive, and tells by its gradient what it got."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, one: Any, two: Any) -> Any:
        return one * 3 if two is None else one * 3 + two + 1


class WithUnasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one: torch.Tensor = Unasked.apply(self.layer(x))[0]
        return torch.tanh(one).sin()


def test_custom_functions_get_zeros_for_what_does_not_arrive() -> None:
    """As under `torch.compile`, which captures them; eager mode gives None if it is asked to."""
    torch.manual_seed(0)
    plain, x = WithUnasked(), torch.randn(128, 32)
    compiled, ours = copy.deepcopy(plain), planned(plain, x)
    eager: Any = plain
    for call in (plain, torch.compile(compiled, backend="aot_eager"), ours):
        call(x).sum().backward()
    assert_same_gradients(ours, compiled)
    assert not torch.equal(ours.layer.bias.grad, eager.layer.bias.grad)


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.tanh(self.layer(x + 1)).sin())


def test_a_module_that_returns_what_it_changed() -> None:
    torch.manual_seed(0)
    plain, first = Changing(), leaf(128, 32)
    ours = planned(plain, leaf(128, 32) * 1)
    for model in (plain, ours):
        x = first * 1
        assert model(x) is x
        x.sum().backward()
    assert_same_gradients(plain, ours)


@torch.compiler.disable
def _aside() -> None:
    pass


class Relu(nn.Module):
    """A piece of the forward has nothing but a change of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(torch.tanh(x))
        _aside()
        nn.functional.relu_(h)
        _aside()
        return torch.tanh(self.b(h)).sin()


def test_a_piece_that_changes_its_input() -> None:
    torch.manual_seed(0)
    plain, x = Relu(), torch.randn(128, 32)
    ours = planned(plain, x)
    for model in (plain, ours):
        model(x).sum().backward()
    assert_same_gradients(plain, ours)


def test_planning_and_verifying_leave_inputs_as_they_are() -> None:
    class Doubling(Relu):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.mul_(2)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Doubling(), torch.randn(128, 32)
    before = x.clone()
    made = plan(model, x, budget_gb=1, recompute="*")
    assert isinstance(made, Plan) and made.pieces
    assert torch.equal(x, before)
    assert made.verify(x).worst["gradients"][0] == 0.0
    assert torch.equal(x, before)


class Beginning(Changing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.tanh(self.layer(x)).sin()


class Following(Changing):
    def forward(self, z: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.tanh(self.layer(z)).sin(), y.view(-1)


def test_two_planned_modules_one_behind_the_other() -> None:
    torch.manual_seed(0)
    plain, z, first = (Beginning(), Following()), torch.randn(128, 32), leaf(128, 32)
    ours = planned(plain[0], leaf(128, 32) * 1), planned(plain[1], z, leaf(128, 32) * 1)
    for one, two in (plain, ours):
        y, flat = two(z, one(first * 1))
        (y.sum() + flat.sum()).backward()
    for mine, theirs in zip(ours, plain, strict=True):
        assert_same_gradients(mine, theirs)


def test_hooks_that_leave_nothing_to_capture() -> None:
    """Torch runs a loop in which a graph ends as Python, and captures no bare layer in it."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    model[1].register_full_backward_hook(lambda *_: None)
    made = plan(model, x, budget_gb=1)
    made.apply()
    with pytest.raises(UntraceableModel, match="a module of your own"):
        model(x)
    made.remove()
    model(x).sum().backward()


@pytest.mark.parametrize("budget_gb", [1.0, None])
def test_retain_graph_after_a_step_without(budget_gb):
    """What torch compiles for a backward that is free to overwrite must do for the others too."""
    model, x = Perceptron(width=16, depth=3), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    if budget_gb is None:
        budget_gb = plan(model, x, budget_gb=1).minimum_peak_bytes / 1e9
    plan(model, x, budget_gb=budget_gb).apply()
    for retain in (False, True, False):
        for each in (plain, model):
            each.zero_grad()
            loss = each(x).square().mean()
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
