from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tracer import cost_cache, measured
from tracer.costs import OperationCost, signature
from tracer.errors import PlannerError
from tracer.hardware import HardwareProfile, load_profile
from tracer.measured import MeasuredCosts
from tracer.probe import CpuProbe
from tracer.roofline import RooflineCosts, moved_bytes
from tracer.smaller import NotScalable, smaller_call
from tracer.synthetic import make_arguments
from tracer.torch_private import FakeTensorMode, tree_leaves, tree_map

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cost_cache.FOLDER_VARIABLE, str(tmp_path))


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls `target`; tensors among the arguments become placeholders."""
    graph = fx.Graph()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    nodes: dict[torch.Tensor, fx.Node] = {}

    def node(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        if a not in nodes:
            fakes[a] = mode.from_tensor(a)
            nodes[a] = graph.placeholder(f"x{len(nodes)}")
            nodes[a].meta["val"] = fakes[a]
        return nodes[a]

    tree = tree_map(node, (args, kwargs))
    made = graph.create_node("call_function", target, *tree)
    with mode, torch.no_grad():
        inputs = tree_map(lambda a: fakes[a] if isinstance(a, torch.Tensor) else a, (args, kwargs))
        made.meta["val"] = target(*inputs[0], **inputs[1])
    return made


def quick() -> MeasuredCosts:
    return MeasuredCosts("cpu", cached=False, seconds=0.0)


def cost(node: fx.Node) -> OperationCost:
    model = quick()
    found = model.cost(node)
    assert model.unmeasured == {}
    return found


# Signatures


def test_signature_is_text_of_json_and_the_same_for_the_same_call():
    x, y, z = torch.rand(4), torch.rand(2, 3), torch.rand(3, 4)
    a, b = call(aten.addmm.default, x, y, z), call(aten.addmm.default, x, y, z)
    assert signature(a) == signature(b)
    assert json.loads(signature(a))[0] == "aten.addmm.default"


def test_signature_tells_shapes_strides_dtypes_and_numbers_apart():
    x = torch.rand(4, 6)
    nodes = [
        call(aten.sum.dim_IntList, x, [0]),
        call(aten.sum.dim_IntList, x, [1]),
        call(aten.sum.dim_IntList, x, [1], True),
        call(aten.sum.dim_IntList, x.double(), [0]),
        call(aten.sum.dim_IntList, torch.rand(6, 4).t(), [0]),
        call(aten.sum.dim_IntList, torch.rand(1, 6).expand(4, 6), [0]),
    ]
    assert len({signature(n) for n in nodes}) == len(nodes)


def test_signature_tells_one_tensor_twice_from_two():
    x, y = torch.rand(4), torch.rand(4)
    assert signature(call(aten.mul.Tensor, x, x)) != signature(call(aten.mul.Tensor, x, y))


def test_signature_does_not_depend_on_the_device_a_model_waits_on():
    here, nowhere = (call(aten.exp.default, torch.empty(8, device=d)) for d in ("cpu", "meta"))
    assert signature(here) == signature(nowhere)


# Made-up arguments


@pytest.mark.parametrize(
    "like",
    [
        torch.rand(3, 4, 5).transpose(0, 2),
        torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.rand(1, 4).expand(6, 4),
        torch.rand(0, 4),
        torch.rand(7, dtype=torch.float64).to(torch.bfloat16),
        torch.rand(3, dtype=torch.complex64),
        torch.rand(300, 301),  # longer than the noise that it repeats
    ],
)
def test_arguments_have_the_shape_strides_and_dtype_of_the_node(like):
    (made,), _ = make_arguments(call(aten.clone.default, like), torch.device("cpu"))
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert torch.isfinite(made).all()


INDEXED = {
    "embedding": lambda i: call(aten.embedding.default, torch.rand(5, 3), i),
    "embedding_dense_backward": lambda i: call(
        aten.embedding_dense_backward.default, torch.rand(40, 3), i, 5, -1, False
    ),
    "index_select": lambda i: call(aten.index_select.default, torch.rand(3, 5), 1, i),
    "index": lambda i: call(aten.index.Tensor, torch.rand(9, 5), [None, i]),
    "index_put": lambda i: call(aten.index_put.default, torch.rand(5), [i], torch.rand(40), True),
    "gather": lambda i: call(aten.gather.default, torch.rand(5), 0, i),
    "scatter_add": lambda i: call(aten.scatter_add.default, torch.rand(5), 0, i, torch.rand(40)),
    "nll_loss": lambda i: call(aten.nll_loss_forward.default, torch.rand(40, 5), i, None, 1, -100),
}


@pytest.mark.parametrize("operator_name", INDEXED)
def test_indices_lie_in_the_table_and_are_spread_over_it(operator_name):
    torch.manual_seed(0)
    node = INDEXED[operator_name](torch.zeros(40, dtype=torch.int64))
    args, _ = make_arguments(node, torch.device("cpu"))
    flat = tree_leaves(args)
    (index,) = (a for a in flat if isinstance(a, torch.Tensor) and a.dtype is torch.int64)
    assert set(index.tolist()) == set(range(5))
    assert cost(node).time_ns > 0


def test_backward_of_pooling_gets_positions_in_the_plane():
    x = torch.rand(1, 1, 4, 4)
    y, index = aten.max_pool2d_with_indices(x, [2, 2])
    node = call(
        aten.max_pool2d_with_indices_backward.default,
        *(y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index),
    )
    args, _ = make_arguments(node, torch.device("cpu"))
    assert args[-1].min() >= 0 and args[-1].max() < 16


# Measured costs

KEPT = 1 << 20


@torch.library.custom_op("cost_tests::scratch", mutates_args=())
def scratch(x: torch.Tensor) -> torch.Tensor:
    """Allocates 3 MiB on the way, and keeps twice what its shape says."""
    a, b = x.new_empty(KEPT // 2), x.new_empty(KEPT // 4)
    del a, b
    return x.new_zeros(KEPT // 2)[: KEPT // 4]


@scratch.register_fake
def _(x):
    return x.new_empty(KEPT // 4)


@torch.library.custom_op("cost_tests::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    """Cannot run."""
    raise RuntimeError("no such kernel")


@broken.register_fake
def _(x):
    return torch.empty_like(x)


def test_workspace_and_kept_bytes_are_what_the_kernel_allocates():
    found = cost(call(torch.ops.cost_tests.scratch.default, torch.rand(8)))
    assert found.outputs == (2 * KEPT,)
    assert found.workspace == KEPT  # 3 MiB at the peak, 2 of which stay


@pytest.mark.parametrize(
    "node",
    [
        call(aten.mm.default, torch.rand(64, 64), torch.rand(64, 64)),
        call(aten.add.Tensor, torch.rand(64, 64), torch.rand(64, 64)),
        call(aten.native_layer_norm.default, torch.rand(64, 64), [64], None, None, 1e-5),
        call(aten._softmax.default, torch.rand(64, 64), -1, False),
    ],
    ids=lambda n: n.name,
)
def test_kernels_without_workspace(node):
    found = cost(node)
    assert (found.workspace, found.outputs) == (0, None)


def batch_norm_backward(*asked: bool, dtype: torch.dtype = torch.float32) -> fx.Node:
    x, vectors = torch.rand(4, 8, 5, 5, dtype=dtype), [torch.rand(8, dtype=dtype) for _ in range(5)]
    return call(
        aten.native_batch_norm_backward.default, x, x.clone(), *vectors, True, 1e-5, list(asked)
    )


def test_results_that_nobody_asked_for_keep_nothing():
    assert cost(batch_norm_backward(False, True, True)).outputs == (0, 32, 32)
    assert cost(batch_norm_backward(True, True, True)).outputs is None


def test_statistics_may_be_wider_than_their_fakes():
    assert cost(batch_norm_backward(True, True, True, dtype=torch.bfloat16)).time_ns > 0


def test_safe_softmax_holds_a_mask():
    found = cost(call(aten._safe_softmax.default, torch.rand(256, 512), -1))
    assert 256 * 512 <= found.workspace <= 256 * 512 + 8 * 256


def test_the_process_is_left_as_it_was():
    node = call(aten.native_dropout.default, torch.rand(64), 0.5, True)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        quick().prepare([node])
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == threads


def test_measuring_works_inside_a_fake_mode():
    node = call(aten.native_dropout.default, torch.rand(64), 0.5, True)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with FakeTensorMode():
        assert cost(node).time_ns > 0
    assert torch.equal(torch.rand(4), expected)


def test_a_running_profiler_is_not_disturbed():
    node = call(aten.exp.default, torch.rand(64))
    with torch.autograd.profiler.profile() as profiler:
        with pytest.raises(PlannerError, match="while a torch profiler records"):
            quick().prepare([node])
        torch.rand(4).exp()
    assert "aten::exp" in {e.name for e in profiler.function_events}


def test_each_signature_is_measured_once_and_progress_is_told():
    nodes = [call(aten.exp.default, torch.rand(n)) for n in (4, 5, 4, 5)]
    model, told = quick(), []
    model.prepare(nodes, lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    assert model.cost(nodes[0]) == model.cost(nodes[2])
    model.prepare(nodes, lambda *_: pytest.fail("measured again"))


def test_what_cannot_run_is_estimated_and_reported():
    model = quick()
    node = call(torch.ops.cost_tests.broken.default, torch.rand(1 << 16))
    assert model.cost(node).time_ns > 0
    assert "no such kernel" in model.unmeasured["cost_tests.broken.default"]


def test_small_calls_are_timed_in_turns_and_large_ones_alone(monkeypatch):
    sizes = []

    def times_ns(self, calls):
        sizes.append(len(calls))
        for made in calls:
            made()
        return [1_000_000] * len(calls)

    monkeypatch.setattr(CpuProbe, "times_ns", times_ns)
    monkeypatch.setattr(measured, "view_ns", lambda: 1)
    nodes = [call(aten.exp.default, torch.rand(n)) for n in (4, 1 << 20, 5, 6)]
    model = MeasuredCosts("cpu", cached=False)
    model.prepare(nodes)
    assert sizes == [1] * 5 + [3] * 5  # as many samples as make a standard error
    assert {model.cost(n).time_ns for n in nodes} == {1_000_000}


def test_what_fails_while_it_is_timed_is_estimated_and_reported(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(measured, "settled_times_ns", fails)
    nodes = [call(aten.exp.default, torch.rand(4)), call(aten.tanh.default, torch.rand(1 << 20))]
    model = quick()
    model.prepare(nodes)
    assert all(model.cost(n).time_ns > 0 for n in nodes)
    for name in ("aten.exp.default", "aten.tanh.default"):
        assert "no memory left" in model.unmeasured[name]


@pytest.mark.parametrize("limit", ["memory", "time"])
def test_what_is_too_large_is_scaled_from_a_smaller_call(monkeypatch, limit):
    a, b = torch.rand(64, 32), torch.rand(32, 16)
    node = call(aten.mm.default, a, b)
    model = quick()
    if limit == "memory":
        half = (a.nbytes + b.nbytes + 2 * 64 * 16 * 4) / 2
        monkeypatch.setattr(measured, "available_bytes", lambda _: half / measured._SHARE)
    else:
        model._estimate = RooflineCosts(device())
        monkeypatch.setattr(measured, "_LONGEST_NS", model._estimate.cost(node).time_ns // 2)
    assert model.cost(node).time_ns > 0
    assert "4 times smaller" in model.unmeasured["aten.mm.default"]


def test_a_smaller_call_replaces_the_size_wherever_it_stands():
    x = torch.rand(24, 6).t()
    small = smaller_call(call(aten.expand.default, torch.rand(1, 6), [24, 6]), 4)
    assert small.args[1] == [6, 6]
    small = smaller_call(call(aten.mm.default, torch.rand(24, 6), x), 4)
    assert [tuple(n.meta["val"].shape) for n in small.all_input_nodes] == [(6, 6), (6, 6)]
    with pytest.raises(NotScalable):
        smaller_call(call(aten.sum.default, torch.rand(8)), 2)


# Roofline


def device(**changes: Any) -> HardwareProfile:
    numbers: dict[str, Any] = {
        "name": "test",
        "device": "cpu",
        "memory_bytes": 1 << 30,
        "granularity": 1,
        "bytes_per_second": 1e9,
        "flops": {"float32": 1e9},
        "launch_ns": 100,
        "tile": 1,
        "efficiency": dict.fromkeys(("matmul", "convolution", "attention", "memory"), 1.0),
    }
    return HardwareProfile(**{**numbers, **changes})


def test_a_product_takes_its_arithmetic_and_a_launch():
    node = call(aten.mm.default, torch.rand(100, 100), torch.rand(100, 100))
    assert RooflineCosts(device()).cost(node).time_ns == 2 * 100**3 + 100


def test_the_rest_takes_its_traffic_and_a_launch():
    node = call(aten.add.Tensor, torch.rand(100, 100), torch.rand(1, 100).expand(100, 100))
    assert moved_bytes(node) == 40_000 + 40_000 + 400
    assert RooflineCosts(device()).cost(node).time_ns == 80_400 + 100


def test_a_lookup_reads_the_rows_that_it_takes():
    node = call(aten.embedding.default, torch.rand(1000, 8), torch.zeros(4, dtype=torch.int64))
    assert moved_bytes(node) == 2 * 4 * 8 * 4 + 4 * 8


def test_tiles_that_are_not_full_cost_as_much_as_full_ones():
    node = call(aten.mm.default, torch.rand(65, 64), torch.rand(64, 64))
    full = call(aten.mm.default, torch.rand(128, 64), torch.rand(64, 64))
    model = RooflineCosts(device(tile=64))
    assert model.cost(node).time_ns == model.cost(full).time_ns


def test_operators_without_formula_are_reported():
    model = RooflineCosts(device())
    model.prepare([call(aten.linalg_inv_ex.default, torch.rand(8, 8))])
    model.prepare([call(torch.ops.cost_tests.broken.default, torch.rand(8))])
    model.prepare([call(aten.rsqrt.default, torch.rand(8))])
    assert set(model.unmeasured) == {"aten.linalg_inv_ex.default", "cost_tests.broken.default"}


def test_nothing_is_run_or_allocated():
    terabyte = torch.empty(1 << 20, 1 << 18, device="meta")
    node = call(aten.mm.default, terabyte, torch.empty(1 << 18, 4, device="meta"))
    found = RooflineCosts(load_profile("a100-80gb")).cost(node)
    assert 0.4e9 < found.time_ns < 1e9  # 1.1 TB at about 2 TB/s


def test_causal_attention_is_half_of_the_arithmetic():
    q = torch.rand(1, 2, 64, 32)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    model = RooflineCosts(device(bytes_per_second=1e30, launch_ns=0))
    full, half = (call(attention, q, q.clone(), q.clone(), 0.0, c) for c in (False, True))
    assert model.cost(full).time_ns == 2 * model.cost(half).time_ns


def test_attention_traced_without_the_device_has_the_workspace_that_it_has_there():
    q, sums = torch.rand(1, 2, 64, 32), torch.rand(1, 64, 2)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    node = call(backward, *(q.clone() for _ in range(5)), sums, 0.0, False)
    padded = 1 * 2 * 128 * (32 + 1) * 4
    assert RooflineCosts(load_profile("h100-80gb")).cost(node).workspace >= padded
    assert RooflineCosts(device()).cost(node).workspace == 0


def test_attention_and_convolution_have_formulas():
    q = torch.rand(1, 2, 64, 32)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    nodes = [
        call(attention, q, q.clone(), q.clone()),
        call(
            aten.convolution.default,
            *(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1]),
            *(False, [0, 0], 1),
        ),
    ]
    model = RooflineCosts(device(bytes_per_second=1e30))
    flops = [model.cost(n).time_ns - 100 for n in nodes]
    assert flops == [2 * 2 * 64 * 64 * 32 * 2, 2 * 8 * 8 * 4 * 3 * 9]
    assert model.unmeasured == {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the room is one in glibc's heap")
def test_calls_are_timed_with_room_for_their_results() -> None:
    code = """
import resource, torch
from tracer.probe import CpuProbe

torch.set_num_threads(1)
probe, x = CpuProbe(), torch.ones(8 << 20)

def faults(calls=4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        probe.times_ns([lambda: x + x])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls

x + x
without = faults()
room = probe.room(32 << 20, 32 << 20)
faults(1)
print(without, faults(), probe.room(1 << 30, 1 << 30))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    without, within, none = done.stdout.split()
    assert float(without) > 8000  # 32 MiB in pages of 4 KiB
    assert float(within) < 100
    assert none == "None"
