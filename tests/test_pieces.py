"""Forwards that torch captures in pieces: planned together, trained as without a plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planner import InfeasibleBudget, Plan, StalePlan, UntraceableModel, plan
from runtime import measure
from tests.captured import captures

GB = 1e9
BREAK = "tests/test_pieces.py"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(nn.functional.gelu(self.up(x))))
        return x + y


@torch.compiler.disable
def aside() -> None:
    """Python that torch does not trace."""


class Broken(nn.Module):
    """Blocks with a graph break after each."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            aside()
        return x


class Cache:
    """Tensors that pytree does not see, as in the key-value caches of transformers."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Crossing(Broken):
    """What the first block makes is read by every later one; returns one thing to lose, or more."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        first = y = self.blocks[0](x)
        cache = Cache()
        for block in list(self.blocks)[1:]:
            aside()
            y = block(y + first)
            cache.kept.append(torch.tanh(y))
        if self.returns == "loss":
            return {"loss": y.square().mean(), "cache": cache, "first": first}
        return {"first": first, "last": y, "cache": cache}


class Partly(nn.Module):
    """Its second and its last piece have nothing to run backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        aside()
        x, scale = x.clone(), x.detach().tanh()
        aside()
        result: torch.Tensor = self.last(x * scale)
        aside()
        return result.clone(), result.detach().tanh()


class Scan(torch.autograd.Function):
    """Counts its calls, which torch does not trace; reads what it saved twice."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        Scan.calls += 1
        rows, h = [], torch.zeros_like(x[0])
        for row in x:
            h = decay * h + row
            rows.append(h)
        y = torch.stack(rows)
        ctx.save_for_backward(decay, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert len(ctx.saved_tensors) == 2
        decay, y = ctx.saved_tensors
        (g,), at = grads, torch.zeros_like(grads[0][0])
        gx, gd = torch.zeros_like(g), torch.zeros_like(decay)
        for t in range(len(g) - 1, -1, -1):
            at = gx[t] = g[t] + at
            if t:
                gd += (at * y[t - 1]).sum(0)
            at = at * decay
        return gx, gd


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)
        self.decay = nn.Parameter(torch.full((16,), 0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Scan.apply(self.first(x), self.decay)
        result: torch.Tensor = self.last(y)
        return result


class Drawing(nn.Module):
    """Draws from a generator of its own, from numpy, and from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)
        self.own = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h * (torch.rand(h.shape, generator=self.own) > 0.3)
        h = h * float(np.random.uniform(0.5, 1.5)) + random.random()
        result: torch.Tensor = self.last(h)
        return result


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = Block(16)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        result: torch.Tensor = self.head(out)
        return result


class Telling(nn.Module):
    """Takes numbers out of tensors to log and to return them, and to scale with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)
        self.seen: list[float] = []
        self.size = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        self.size = h.detach().norm().item()
        y = self.last(h / self.size)
        loss = y.square().mean()
        self.seen.append(loss.item())
        return y, int((y > 0).sum())


class Averaged(nn.Module):
    """Batch norm that weighs all batches alike: by a number that it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


class Masking(nn.Module):
    """How many rows the second part sees is known when the first has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(16), Block(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        result: torch.Tensor = self.last(h[h.sum(-1) > 0])
        return result


X = torch.randn(32, 8, 16, generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "averages": (Averaged, (X,)),
    "graph_break": (Broken, (X.repeat(4, 1, 4),)),
    "autograd_function": (Scanned, (X,)),
    "generators": (Drawing, (X,)),
    "masks": (Masking, (X,)),
    "nothing_backward": (Partly, (X,)),
    "numbers": (Telling, (X,)),
    "packed": (Packed, (torch.arange(21).reshape(3, 7) % 20, torch.tensor([7, 2, 5]))),
}


def seeded(seed: int = 5) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def train(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def steps(model: nn.Module, args: tuple[Any, ...], count: int = 3) -> list[torch.Tensor]:
    seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        out = model(*args)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_trains_as_without_a_plan(name: str) -> None:
    make, args = CASES[name]
    seeded()
    model = make()
    plain = copy.deepcopy(model)
    before = Scan.calls
    wide = plan(model, args, budget_gb=1)
    assert isinstance(wide, Plan)
    assert wide.breaks and all("Data-dependent branching" not in b for b in wide.breaks)
    assert any(BREAK in b or "batchnorm.py" in b for b in wide.breaks), wide.breaks
    middle = (wide.minimum_peak_bytes + wide.baseline_peak_bytes) // 2
    made = plan(model, args, budget_gb=max(middle, wide.minimum_peak_bytes) / GB)
    assert isinstance(made, Plan) and made.peak_bytes <= made.budget_bytes
    assert Scan.calls - before == (2 if name == "autograd_function" else 0)
    made.apply()
    losses = steps(model, args)
    assert Scan.calls - before == (5 if name == "autograd_function" else 0)
    # A recurrent layer is traced step by step, where eager has one kernel that rounds otherwise.
    same = torch.allclose if name == "packed" else torch.equal
    for one, other in zip(losses, steps(plain, args), strict=True):
        assert same(one, other)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert same(p, q), n
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
    assert getattr(model, "seen", None) == getattr(plain, "seen", None)


def test_a_number_of_which_nothing_is_made_costs_no_capture_per_step() -> None:
    """It only leaves: as a result, an attribute or in a message."""

    class Logging(Broken):
        last = 0.0

        def forward(self, x: torch.Tensor) -> Any:
            loss = self.blocks[0](x).square().mean()
            self.last = loss.item()
            return loss, f"{self.last:.3f}"

    model = Logging()
    plan(model, X.repeat(1, 1, 4), budget_gb=1).apply()
    found = []
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(32, 8, 64)
        loss, said = model(x)
        loss.backward()
        assert said == f"{loss.item():.3f}" == f"{model.last:.3f}"
        found.append(model.plan)
    assert found[0] is found[1] is found[2]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(64), Block(64)


class Scaled(Pair):
    """Divides by a number that is another one in each step."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        result: torch.Tensor = self.last(y / y.detach().norm().item())
        return result


class Trimmed(Pair):
    """Cuts a padded batch to its longest sequence."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        inside = torch.arange(longest) < lengths[:, None]
        result: torch.Tensor = self.last(self.first(x[:, :longest])) * inside[..., None]
        return result


@pytest.mark.parametrize("make", [Scaled, Trimmed])
def test_numbers_and_sizes_from_data_are_captured_twice(
    make: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they are symbols."""
    found = captures(monkeypatch)
    model = make()
    plain, lengths = copy.deepcopy(model), torch.tensor([3, 19, 7, 2])
    made = plan(model, (torch.randn(4, 20, 64), lengths), budget_gb=1)
    assert isinstance(made, Plan)
    made.apply()
    counts = []
    for step in range(6):
        x, shorter = torch.randn(4, 20, 64), lengths - (step > 1) * (step % 3)
        for each in (model, plain):
            each.zero_grad()
            each(x, shorter).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is q.grad or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        counts.append(len(found))
    assert counts[-1] == counts[3] <= 2 * len(made.pieces)


def test_one_budget_for_all_pieces() -> None:
    torch.manual_seed(0)
    model, args = Broken(), CASES["graph_break"][1]
    wide = plan(model, args, budget_gb=1)
    assert isinstance(wide, Plan) and len(wide.pieces) == 4
    overheads = []
    for part in (1.0, 0.6, 0.3, 0.0):
        room = wide.baseline_peak_bytes - wide.minimum_peak_bytes
        budget = wide.minimum_peak_bytes + int(part * room)
        made = plan(model, args, budget_gb=budget / GB)
        assert isinstance(made, Plan)
        check = made.verify(args)
        assert check.bitwise and check.within_budget, check
        assert made.lower_bound <= made.overhead
        overheads.append(made.overhead)
    assert overheads == sorted(overheads) and overheads[0] == 0 < overheads[-1]
    with pytest.raises(InfeasibleBudget) as caught:
        plan(model, args, budget_gb=wide.minimum_peak_bytes * 0.99 / GB)
    assert caught.value.minimum_bytes == wide.minimum_peak_bytes


@pytest.mark.parametrize("returns", ["loss", "outputs"])
def test_what_crosses_between_pieces_is_counted(returns: str) -> None:
    """Gradients that wait for earlier pieces, what the caller holds, what its loss holds."""
    torch.manual_seed(0)
    model, (x,) = Crossing(returns), CASES["graph_break"][1]
    held: list[Any] = []

    def step() -> None:
        held[:] = [model(x)]
        out = held[0]
        if returns == "loss":
            out["loss"].backward()
        else:
            ((out["last"] - 1).square().mean() + (out["first"] - 1).square().mean()).backward()

    wide = plan(model, (x,), budget_gb=1)
    assert isinstance(wide, Plan) and wide.breaks
    for part in (0.0, 0.5, 1.0):
        room = wide.baseline_peak_bytes - wide.minimum_peak_bytes
        budget = wide.minimum_peak_bytes + int(part * room)
        made = plan(model, (x,), budget_gb=budget / GB)
        made.apply()
        step()
        held.clear()
        model.zero_grad(set_to_none=True)
        measured = measure(step, model, inputs=x).peak_bytes
        held.clear()
        model.zero_grad(set_to_none=True)
        assert isinstance(made, Plan)
        assert measured <= made.budget_bytes
        assert made.peak_bytes <= 1.05 * measured
        made.remove()


def test_a_pending_plan_and_a_new_shape_are_planned_when_they_come() -> None:
    torch.manual_seed(0)
    model, (x,) = Broken(), CASES["graph_break"][1]
    plain = copy.deepcopy(model)
    plan(model, budget_gb=0.01).apply()
    for batch in (x, x[:50], x):
        for each in (model, plain):
            each.zero_grad()
            each(batch).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
        planned = measure(partial(train, model, batch), model, inputs=batch)
        assert isinstance(model.plan, Plan) and model.plan.breaks
        assert planned.peak_bytes <= 0.01 * GB


def test_plan_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = Broken(), CASES["graph_break"][1]
    wide = plan(model, args, budget_gb=1)
    assert isinstance(wide, Plan)
    made = plan(model, args, budget_gb=wide.minimum_peak_bytes / GB)
    assert isinstance(made, Plan)
    path = tmp_path / "plan.json"
    made.save(path)
    loaded = Plan.load(path, model)
    assert loaded == made and str(loaded) == str(made)
    check = loaded.verify(args)
    assert check.bitwise and check.within_budget, check
    Plan.load(path).apply(other := Broken(depth=3))
    with pytest.raises(StalePlan):
        other(CASES["graph_break"][1][0][:7])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum() > 0,
        lambda x: x.sum().item() > 0,
        lambda x: x.sum().item(),
        lambda x: not int((x > 0).sum()),
    ],
)
def test_a_branch_on_data_is_refused(ask: Callable[[torch.Tensor], Any]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.block(x)
            return 2 * y if ask(y) else y

    with pytest.raises(UntraceableModel, match=r"(?s)test_pieces\.py.*torch\.where"):
        plan(Branching(), X.repeat(1, 1, 4), budget_gb=1)


def test_backward_hooks_of_modules_run_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), nn.Tanh(), Block(16))
    log: list[str] = []

    def doubled(_module: nn.Module, args: Any) -> Any:
        log.append("pre")
        return (args[0] * 2,)

    model[0].register_forward_pre_hook(doubled)
    model[2].register_full_backward_hook(lambda _m, _i, _o: log.append("back"))
    made = plan(model, X, budget_gb=1)
    assert isinstance(made, Plan) and not log
    assert any("backward hooks" in note for note in made.notes)
    made.apply()
    for _ in range(2):
        model(X).square().mean().backward()
    assert log == ["pre", "back"] * 2


class Frozen(dict[str, Any]):
    """As a configuration in diffusers: what it holds stays."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("frozen")


class Counting(nn.Module):
    """Python state that forward changes and reads, as for a warm-up or a log."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.settings = Frozen(width=16)
        self.calls, self.scale = 0, torch.ones(())  # no buffer
        self.log: dict[str, list[int]] = {"calls": [], "none": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log["calls"].append(self.calls)
        x = self.first(x).sin()
        aside()
        self.rows = x.shape[0]
        self.scale.add_(0.1)
        y: torch.Tensor = self.second(x) * (self.scale + 0.1 * self.calls)
        return y.square().mean()


def test_python_attributes_are_as_before_planning() -> None:
    model, x = Counting(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudget):
        plan(model, x, budget_gb=1e-9)
    made = plan(model, x, budget_gb=1)
    assert isinstance(made, Plan) and made.pieces
    made.apply()
    for step in range(1, 4):
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert (model.calls, model.log) == (step, {"calls": list(range(1, step + 1)), "none": []})
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert made.verify(x).bitwise
    assert (model.calls, model.log, model.scale) == (plain.calls, plain.log, plain.scale)


def test_attributes_that_a_first_forward_makes_are_gone_again() -> None:
    model, x = Counting(), torch.randn(32, 16)
    plan(model, x, budget_gb=1)
    assert not hasattr(model, "rows")
    assert model.settings == {"width": 16}


class SettingUp(nn.Module):
    """Puts a hook on at its first forward, once, as transformers does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(16), Block(16)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "ready"):
            self.first.register_forward_hook(lambda _m, _i, y: self.kept.append(y.detach()))
            self.ready = True
        self.kept.clear()
        x = self.first(x)
        aside()
        return self.second(x), list(self.kept)


def test_what_a_first_forward_sets_up_is_set_up_once() -> None:
    torch.manual_seed(0)
    model = SettingUp()
    plain = copy.deepcopy(model)
    made = plan(model, X, budget_gb=1)
    assert isinstance(made, Plan) and made.pieces
    made.apply()
    for _ in range(2):
        (out, kept), (other, also) = plain(X), model(X)
        assert len(kept) == len(also) == 1 and torch.equal(kept[0], also[0])
        out.square().mean().backward()
        other.square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
