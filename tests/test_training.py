"""Planned modules train as the plain ones do: outputs, gradients, buffers, memory, features."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from planner import Plan, frontier, plan
from planner.verify import loss_of
from runtime import measure
from tests.models import MODELS, Perceptron, bert, gpt2

GB = 1e9
QUICK = 2.0  # seconds for the solver: these tests are about what runs, not how good it is


def tight(model: nn.Module, batch: Any, fraction: float, **options: Any) -> Plan:
    """A plan at a fraction of the way from the least possible to the plain step's saved bytes."""
    wide = plan(model, batch, budget_gb=1000, **options)
    assert isinstance(wide, Plan)
    if not wide.pieces:
        return tighter(wide, fraction)
    made = plan(model, batch, budget_gb=at_fraction(wide, fraction), time_limit=QUICK, **options)
    assert isinstance(made, Plan)
    return made


def tighter(wide: Plan, fraction: float) -> Plan:
    """The same, of a step that is captured already, in one graph."""
    return wide.edit(budget_gb=at_fraction(wide, fraction), time_limit=QUICK)


def at_fraction(wide: Plan, fraction: float) -> float:
    saved = wide.baseline_peak_bytes - (1 - fraction) * wide.baseline_saved_bytes
    return max(int(saved), wide.minimum_peak_bytes) / GB


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad), name
    for (name, b), c in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(b, c), name


# Torch's traced backward sums otherwise than eager mode there, with or without recomputation: one
# bias gradient of the U-Net over a tensor of other strides; up to 2.11 Llama's in another order.
OTHER_KERNEL = ("unet", "llama") if torch.__version__ < "2.12" else ("unet",)


def torchs_trace(model: nn.Module, batch: Any) -> dict[str, torch.Tensor | None]:
    """Gradients by torch's own backend that runs what it traces, as it is."""
    traced = copy.deepcopy(model)
    loss_of(torch.compile(traced, backend="aot_eager")(**batch)).backward()
    return gradients(traced)


def planned_gradients(model: nn.Module, batch: Any, made: Plan) -> dict[str, torch.Tensor | None]:
    made.apply()
    model.zero_grad(set_to_none=True)
    loss_of(model(**batch)).backward()
    found = gradients(model)
    made.remove()
    model.zero_grad(set_to_none=True)
    return found


def all_same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> bool:
    """Bitwise; both may be None: of a parameter that the loss does not use."""
    return one.keys() == other.keys() and all(
        other[n] is g or same(g, other[n]) for n, g in one.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_bitwise_and_within_budget(name: str) -> None:
    """Three budgets: everything equals plain eager, and the measured peak keeps to the budget."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    wide = plan(model, batch, budget_gb=1000)
    assert isinstance(wide, Plan) and not wide.recomputed
    unrecomputed = planned_gradients(model, batch, wide)
    if name in OTHER_KERNEL:
        assert all_same(unrecomputed, torchs_trace(model, batch))
    peaks = []
    for fraction in (0.7, 0.4, 0.0):
        # Up to 2.12 torch captures T5 in pieces.
        made = tight(model, batch, fraction) if wide.pieces else tighter(wide, fraction)
        check = made.verify(batch)
        differing = {what for what, (difference, _) in check.worst.items() if difference != 0.0}
        assert differing <= ({"gradients"} if name in OTHER_KERNEL else set()), check
        assert all_same(planned_gradients(model, batch, made), unrecomputed)
        assert check.within_budget, check
        assert abs(check.planned.peak_bytes / made.peak_bytes - 1) < 0.03, check
        assert made.lower_bound <= made.overhead + 1e-12
        peaks.append(check.planned.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert made.recomputed  # the least budget forces recomputation


@pytest.mark.parametrize("make", [bert, gpt2])
def test_dropout_replays_the_same_mask(make: Any) -> None:
    """Under one seed, gradients equal those of the same program without recomputation."""
    torch.manual_seed(0)
    model, batch = make(dropout=0.1)
    wide = plan(model, batch, budget_gb=1000)
    small = tight(model, batch, 0.0)
    assert any("dropout" in r.op for r in small.recomputed)
    results = []
    for made in (wide, small):
        assert isinstance(made, Plan)
        made.apply()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        loss = model(**batch).loss
        loss.backward()
        results.append((loss.detach(), gradients(model), torch.get_rng_state()))
        made.remove()
    (loss_a, grads_a, rng_a), (loss_b, grads_b, rng_b) = results
    assert torch.equal(loss_a, loss_b)
    assert torch.equal(rng_a, rng_b)
    for name, gradient in grads_a.items():
        assert same(gradient, grads_b[name]), name


def test_replayed_random_numbers_count() -> None:
    """A random operation that runs again holds the generator's state that it will put back."""
    torch.manual_seed(0)
    model, x = Perceptron(32, 8, dropout=0.1), torch.randn(512, 32)
    made = tight(model, x, 0.0)
    assert any("dropout" in r.op or "bernoulli" in r.op for r in made.recomputed)
    check = made.verify(x)
    assert check.bitwise and check.within_budget, check
    assert made.budget_bytes == made.minimum_peak_bytes


def test_dropout_gradient_is_the_derivative() -> None:
    """Finite differences in float64: the mask of the recomputation is that of the loss."""
    torch.manual_seed(0)
    model = Perceptron(8, 4, dropout=0.5).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    small = tight(model, x, 0.0, recompute="dropout")
    assert any("dropout" in r.op for r in small.recomputed)
    small.apply()

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        result: torch.Tensor = model(x).square().sum()
        return result

    loss().backward()
    weight = model.layers[0].weight
    gradient, weight.grad = weight.grad, None
    model.zero_grad(set_to_none=True)  # gradients that exist would need room beside the budget
    assert gradient is not None
    step = 1e-6
    for place in [(0, 0), (3, 5), (7, 2)]:
        with torch.no_grad():
            weight[place] += step
        high = loss().item()
        with torch.no_grad():
            weight[place] -= 2 * step
        low = loss().item()
        with torch.no_grad():
            weight[place] += step
        assert gradient[place].item() == pytest.approx((high - low) / (2 * step), abs=1e-5)


def test_batch_norm_moves_once() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["resnet"]()
    twin = copy.deepcopy(model)
    made = tight(model, batch, 0.0)
    assert any("batch_norm" in r.op for r in made.recomputed)
    made.apply()
    for each in (model, twin):
        each(**batch).loss.backward()
    tracked = [b for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
    assert tracked and all(int(b) == 1 for b in tracked)
    assert_same(model, twin)


def test_training_loop_equals_plain_bitwise() -> None:
    """20 steps of AdamW: same losses, same parameters; memory does not grow."""
    torch.manual_seed(0)
    model, batch = bert()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin))
    made = tight(model, batch, 0.0, optimizer=optimizer)
    assert made.recomputed
    made.apply()
    losses: list[list[float]] = [[], []]
    added = []

    def step(m: nn.Module, o: torch.optim.Optimizer, into: list[float]) -> None:
        o.zero_grad()
        loss = m(**batch).loss
        loss.backward()
        o.step()
        into.append(loss.item())

    for _ in range(20):
        measured = measure(
            lambda: step(model, optimizer, losses[0]), model, optimizer, list(batch.values())
        )
        added.append(measured.peak_bytes)
        step(twin, other, losses[1])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert_same(model, twin)
    assert max(added[2:]) <= made.budget_bytes
    assert len(set(added[2:])) == 1


def test_accumulation_and_hooks() -> None:
    """Gradients that exist are added to, within the budget; hooks see each one as it is made."""
    torch.manual_seed(0)
    model, batch = bert(layers=4)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(**batch).loss.backward()
    made = tight(model, batch, 0.2)
    assert made.accumulate and made.recomputed
    made.apply()
    calls: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, n=name: calls.append(n))
    measured = measure(lambda: model(**batch).loss.backward(), model, inputs=list(batch.values()))
    assert measured.peak_bytes <= made.budget_bytes
    twin(**batch).loss.backward()
    assert_same(model, twin)
    last = max(i for i, n in enumerate(calls) if ".layer.3." in n)
    first = min(i for i, n in enumerate(calls) if ".layer.0." in n)
    assert last < first
    assert len(calls) == len(set(calls))


def test_gradients_leave_before_the_backward_ends() -> None:
    """The hook of the last layer fires before the first layer's backward has run."""
    torch.manual_seed(0)
    model = Perceptron(64, 6)
    x = torch.randn(8, 64)
    made = plan(model, x, budget_gb=1)
    made.apply()
    seen: list[tuple[str, bool]] = []
    first, last = model.layers[0].weight, model.layers[-1].weight
    last.register_post_accumulate_grad_hook(lambda _: seen.append(("last", first.grad is None)))
    first.register_post_accumulate_grad_hook(lambda _: seen.append(("first", last.grad is None)))
    model(x).sum().backward()
    assert seen == [("last", True), ("first", False)]


def test_module_stays_the_same_object() -> None:
    torch.manual_seed(0)
    model, batch = bert()
    keys, kind, names = list(model.state_dict()), type(model), dict(model.named_parameters())
    made = tight(model, batch, 0.0)
    assert made.apply() is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert all(names[n] is p for n, p in model.named_parameters())
    assert vars(model)["plan"] is made
    clone = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model))
    for other in (clone, restored):
        other.load_state_dict(model.state_dict())
        other(**batch).loss.backward()
    model(**batch).loss.backward()
    assert_same(model, clone)
    assert made.remove() is model
    assert not hasattr(model, "plan")


def test_evaluation_and_no_grad_run_as_before() -> None:
    torch.manual_seed(0)
    model, batch = bert(dropout=0.1)
    twin = copy.deepcopy(model)
    tight(model, batch, 0.0).apply()
    with torch.no_grad():
        torch.manual_seed(1)
        a = model(**batch).loss
        torch.manual_seed(1)
        b = twin(**batch).loss
    assert torch.equal(a, b) and not a.requires_grad
    model.eval(), twin.eval()
    assert torch.equal(model(**batch).logits, twin(**batch).logits)


def planned(model: nn.Module, x: torch.Tensor, budget: float, source: str) -> Plan:
    if source == "plan":
        made = plan(model, x, budget_gb=budget)
    elif source == "edit":
        plan(model, x, budget_gb=1000).apply()
        train(model, torch.randn(96, 64))  # one that the wider budget has room for
        made = in_force(model).edit(budget_gb=budget)
    else:
        made = frontier(model, x, points=[budget]).plan(budget)
    assert isinstance(made, Plan)
    return made


@pytest.mark.parametrize("source", ["plan", "edit", "frontier"])
def test_another_shape_is_planned_within_the_budget(source: str) -> None:
    torch.manual_seed(0)
    model = Perceptron(64, 6)
    twin = copy.deepcopy(model)
    x = torch.randn(512, 64)
    budget = tight(copy.deepcopy(model), x, 0.3).budget_bytes
    made = planned(model, x, budget / GB, source)
    made.apply()
    for rows in (512, 96, 512):
        y = torch.randn(rows, 64)
        for each in (model, twin):
            each.zero_grad(set_to_none=True)
        train(model, y)  # planned here: costs cannot be measured while a profiler records
        for each in (model, twin):
            each.zero_grad(set_to_none=True)
        step = partial(train, model, y)
        measured = measure(step, model, inputs=y)
        assert measured.peak_bytes <= made.budget_bytes == budget
        assert in_force(model).budget_bytes == budget
        train(twin, y)
        assert_same(model, twin)


def in_force(model: nn.Module) -> Plan:
    assert isinstance(model.plan, Plan)
    return model.plan


def train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_verifying_one_plan_leaves_another_in_force() -> None:
    torch.manual_seed(0)
    model, x = Perceptron(64, 6), torch.randn(512, 64)
    made = tight(model, x, 0.3)
    wide = made.edit(budget_gb=1000)
    made.apply()
    assert wide.verify(x).planned.peak_bytes > made.budget_bytes
    step = partial(train, model, x)
    assert measure(step, model, inputs=x).peak_bytes <= made.budget_bytes
    assert in_force(model) is made


def test_pending_plan_is_made_on_the_first_batch() -> None:
    torch.manual_seed(0)
    model, batch = bert()
    budget = tight(model, batch, 0.2).budget_bytes
    twin = copy.deepcopy(model)
    pending = plan(model, budget_gb=budget / GB)
    assert "first training batch" in str(pending)
    model = pending.apply()
    model(**batch).loss.backward()
    assert isinstance(model.plan, Plan) and model.plan.recomputed
    twin(**batch).loss.backward()
    assert_same(model, twin)


def test_retain_graph_partial_and_second_backward() -> None:
    torch.manual_seed(0)
    model = Perceptron(32, 4)
    twin = copy.deepcopy(model)
    x = torch.randn(64, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    tight(model, (x,), 0.0).apply()
    a, b = model(x).square().sum(), twin(y).square().sum()
    for _ in range(2):
        a.backward(retain_graph=True)
        b.backward(retain_graph=True)
    assert_same(model, twin)
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    (one,) = torch.autograd.grad(a, [model.layers[1].weight], retain_graph=True)
    (two,) = torch.autograd.grad(b, [twin.layers[1].weight], retain_graph=True)
    assert torch.equal(one, two)
    a.backward()
    with pytest.raises(RuntimeError, match="second time"):
        a.backward()


def test_two_forwards_before_the_backwards() -> None:
    torch.manual_seed(0)
    model = Perceptron(32, 4, dropout=0.3)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    wide, small = plan(model, x, budget_gb=1), tight(model, x, 0.0)
    results = []
    for made in (wide, small):
        made.apply()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        first, second = model(x).square().sum(), model(y).square().sum()
        first.backward()
        second.backward()
        results.append(gradients(model))
        made.remove()
    for name, gradient in results[0].items():
        other = results[1][name]
        assert same(gradient, other)


def test_second_derivative_is_refused() -> None:
    torch.manual_seed(0)
    model = Perceptron(16, 3)
    x = torch.randn(4, 16, requires_grad=True)
    made = plan(model, (x,), budget_gb=1)
    made.apply()
    (gradient,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    with pytest.raises(Exception, match="double backward"):
        gradient.square().sum().backward()


def test_a_gradient_at_an_output_assumed_unused_is_right() -> None:
    """A model that returns a scalar loss is planned for the loss alone; more works, too."""
    torch.manual_seed(0)
    model, batch = bert()
    twin = copy.deepcopy(model)
    wide = plan(model, batch, budget_gb=1)
    wide.apply()
    for each in (model, twin):
        out = each(**batch)
        (out.loss + out.logits.square().mean()).backward()
    assert_same(model, twin)


class Heads(nn.Module):
    """Two outputs for a loss outside, a part of it, and a loss with what it was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.c = (Perceptron(32, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.trunk(x)
        a, b, c = self.a(h), self.b(h), self.c(h)
        return {"a": a, "part": b.square().mean(), "c": c, "loss": c.tanh().square().mean()}


@pytest.mark.parametrize("used", ["a", "a part", "part", "c", "loss", "a c part", "c loss"])
def test_gradients_of_the_outputs_that_are_used(used: str) -> None:
    """Whatever is differentiated: parameters that only it depends on get their gradients."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    wide = plan(model, x, budget_gb=1)
    assert isinstance(wide, Plan)
    tighter(wide, 0.5).apply()
    for _ in range(2):
        for each in (model, twin):
            each.zero_grad()
            out = each(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                sum(out[name].tanh().sum() for name in used.split()).backward()
        assert_same(model, twin)


def test_a_step_with_other_outputs_used_is_planned_again() -> None:
    """`c` is assumed unused, since the loss is made from it: a warning, and the next step fits."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(256, 32)
    wide = plan(model, x, budget_gb=1)
    assert isinstance(wide, Plan)
    assert any("1 of 4 differentiable outputs" in note for note in wide.notes)
    made = tighter(wide, 0.5)
    made.apply()

    def step() -> None:
        model.zero_grad()
        out = model(x)
        (out["loss"] + out["a"].sum() + out["c"].square().sum()).backward()

    with pytest.warns(UserWarning, match="assumed unused: this step peaks at"):
        step()
    step()  # planned here
    model.zero_grad()
    assert measure(step, model, inputs=x).peak_bytes <= made.budget_bytes


def test_saved_values_are_protected() -> None:
    """Changing a parameter between forward and backward is an error, as in eager."""
    model = Perceptron(16, 3)
    x = torch.randn(4, 16)
    plan(model, x, budget_gb=1).apply()
    loss = model(x).sum()
    with torch.no_grad():
        model.layers[1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_exceptions_leave_the_module_usable() -> None:
    torch.manual_seed(0)
    model = Perceptron(16, 3)
    x = torch.randn(4, 16)
    plan(model, x, budget_gb=1).apply()

    def fail(_: torch.Tensor) -> None:
        raise KeyError("hook")

    handle = model.layers[2].weight.register_hook(fail)
    with pytest.raises(KeyError):
        model(x).sum().backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(x).sum().backward()
    assert_same(model, twin)


def test_memory_is_freed_without_backward() -> None:
    torch.manual_seed(0)
    model = Perceptron(128, 6)
    x = torch.randn(2048, 128)
    plan(model, x, budget_gb=1).apply()
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)

    def forward_only() -> None:
        for _ in range(4):
            model(x)

    one = measure(lambda: model(x), model, inputs=x).added_bytes
    four = measure(forward_only, model, inputs=x).added_bytes
    # the last result is still there while the next one is made, as in eager
    assert four < 2 * one + 4096


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    model = Perceptron(32, 4)
    x = torch.randn(64, 32)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = tight(model, x, 0.0)
    assert made.recomputed
    made.apply()
    for each in (model, twin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(x).float().square().sum()
        loss.backward()
    assert_same(model, twin)


class Speaker(nn.Module):
    """Logits that are large beside everything else, for a loss outside."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.breaks = Perceptron(32, 4), nn.Linear(32, 2000), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x)
        if self.breaks:
            torch.compiler.disable(print)(end="")
        result: torch.Tensor = self.head(h)
        return result


@pytest.mark.parametrize("breaks", [False, True])
def test_room_for_a_loss_in_float32_outside(breaks: bool) -> None:
    """Autocast makes cross-entropy in float32, two times the bytes of the logits and more."""
    torch.manual_seed(0)
    model, x, target = Speaker(breaks=breaks), torch.randn(256, 32), torch.randint(2000, (256,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()

    with torch.autocast("cpu", torch.bfloat16):
        made = tight(model, x, 0.0)
        assert made.verify(x).within_budget
    made.apply()
    step()
    model.zero_grad()
    assert measure(step, model, inputs=(x, target)).peak_bytes <= made.budget_bytes


class UsedTwice(nn.Module):
    """Products under autocast with a part that is exempt from it; what it reads is read twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.query(x.tanh()).transpose(-1, -2)
        with torch.autocast("cpu", enabled=False):
            shares = scores.float().softmax(-1)
        result: torch.Tensor = self.out(shares.to(scores.dtype) @ x.to(scores.dtype))
        return result


def test_autocast_casts_at_each_use() -> None:
    """As eager mode does without its cache, bitwise; backward is called outside."""
    torch.manual_seed(0)
    model = UsedTwice(32)
    x = torch.randn(2, 64, 32, requires_grad=True)
    twin, its = copy.deepcopy(model), x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        made = tight(model, x, 0.0)
    assert made.recomputed
    made.apply()
    for each, given in ((model, x), (twin, its)):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=each is model):
            loss = each(given).float().square().mean()
        loss.backward()
    assert_same(model, twin)
    assert x.grad is not None and its.grad is not None and torch.equal(x.grad, its.grad)


def test_loss_of_prefers_the_scalar() -> None:
    scalar = torch.ones((), requires_grad=True)
    assert loss_of({"a": torch.ones(3, requires_grad=True), "loss": scalar}) is scalar


class Remembering(nn.Module):
    """Reads a buffer and an argument that it then replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        gain = torch.exp(self.mean * 2.0 + scratch.sin())
        y = torch.tanh(self.linear(x)) * gain
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.detach().mean(0))
        scratch.add_(1.0)
        return y.sigmoid() + self.mean


def test_recomputation_sees_the_old_content_of_what_forward_replaces() -> None:
    torch.manual_seed(0)
    model = Remembering()
    twin = copy.deepcopy(model)
    x, scratch = torch.randn(64, 32), torch.zeros(32)
    other = scratch.clone()
    small = plan(model, (x, scratch), budget_gb=1, recompute="*")
    assert {"aten.exp.default", "aten.tanh.default"} <= {r.op for r in small.recomputed}
    small.apply()
    for _ in range(3):
        model(x, scratch).square().sum().backward()
        twin(x, other).square().sum().backward()
        assert_same(model, twin)
        assert torch.equal(scratch, other)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.one, self.two = nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.body(x)
        return self.one(z), self.two(z)


def test_one_head_after_the_other() -> None:
    """Each backward brings other tangents: gradients must find their gates all the same."""
    torch.manual_seed(0)
    model = TwoHeads()
    twin = copy.deepcopy(model)
    x = torch.randn(64, 32)
    plan(model, x, budget_gb=1, recompute="body.*").apply()
    for each in (model, twin):
        a, b = each(x)
        a.square().mean().backward(retain_graph=True)
        b.square().mean().backward(retain_graph=True)
        (a.sum() * b.sum()).backward(inputs=list(each.body.parameters()))
    assert_same(model, twin)
