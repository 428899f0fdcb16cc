from __future__ import annotations

import dataclasses
from importlib import resources

import pytest
import torch

from tests.test_costs import device as a_device
from tracer import cost_cache, hardware
from tracer.errors import UnknownHardware
from tracer.hardware import available_bytes, load_profile, measured_profile, profile_names

CARDS = [
    *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200"),
    *("rtx3090-24gb", "rtx4090-24gb", "l4-24gb"),
]
L4 = (resources.files("tracer") / "profiles" / "l4-24gb.toml").read_text("utf-8")


def test_the_names():
    assert set(profile_names()) == {*CARDS, "cpu"}


@pytest.mark.parametrize("name", CARDS)
def test_profiles_are_whole_and_say_where_they_come_from(name):
    profile = load_profile(name)
    assert profile.sources and all(s.startswith("https://") for s in profile.sources)
    assert {"float64", "float32", "tf32", "float16", "bfloat16"} <= profile.flops.keys()
    assert profile.granularity == 512 and profile.device == "cuda"
    if "gb" in name:
        nominal = int(name.split("-")[1].removesuffix("gb"))
        assert 0.85 * nominal * 2**30 < profile.memory_bytes <= nominal * 2**30


def test_figures_of_the_published_plans():
    v100 = load_profile("v100-32gb")
    assert v100.flop_rate(torch.float32, "matmul") == pytest.approx(12.6e12, rel=1e-3)
    assert v100.byte_rate == pytest.approx(720e9)


def test_float32_uses_tensor_cores_where_torch_would():
    a100 = load_profile("a100-80gb")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert a100.flop_rate(torch.float32, "matmul") == 19.5e12 * a100.efficiency["matmul"]
    assert a100.flop_rate(torch.float32, "convolution") == 156e12 * a100.efficiency["convolution"]
    try:
        matmul.fp32_precision = "tf32"
        assert a100.flop_rate(torch.float32, "matmul") == 156e12 * a100.efficiency["matmul"]
    finally:
        matmul.fp32_precision = before


def test_allocations_are_rounded_up():
    a100 = load_profile("a100-80gb")
    assert [a100.allocated(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_a_profile_from_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(L4.replace("300e9", "301e9"))
    mine = load_profile(tmp_path / "mine.toml")
    assert mine == dataclasses.replace(load_profile("l4-24gb"), bytes_per_second=301e9)


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(UnknownHardware, match=r"no hardware profile 'tpu'.*a100-40gb.*cpu"):
        load_profile("tpu")


@pytest.mark.parametrize(
    "change",
    [
        ("name", "nom"),
        ("[flops]", "[flop]"),
        ("float32 =", "float31 ="),
        ("memory_bytes = ", "memory_bytes = -"),
        ("tile = 64", "tile = 'a'"),
        ("[", "("),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, change):
    (tmp_path / "mine.toml").write_text(L4.replace(*change))
    with pytest.raises(UnknownHardware, match="is not a hardware profile"):
        load_profile(str(tmp_path / "mine.toml"))


def test_the_cpu_at_hand_is_measured_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv(cost_cache.FOLDER_VARIABLE, str(tmp_path))
    hardware._benchmark.cache_clear()
    profile = load_profile("cpu")
    assert profile.byte_rate > 0 and profile.flop_rate(torch.float32, "matmul") > 0
    assert profile.allocated(5) == 5
    hardware._benchmark.cache_clear()
    monkeypatch.setattr(hardware, "_flop_rate", lambda *_: pytest.fail("measured again"))
    assert load_profile("cpu") == profile
    hardware._benchmark.cache_clear()


def test_devices_that_cannot_be_asked():
    assert available_bytes(torch.device("cpu")) > 0
    for function in (available_bytes, measured_profile):
        with pytest.raises(UnknownHardware):
            function(torch.device("meta"))


def test_an_unlisted_dtype_runs_like_float32():
    assert a_device().flop_rate(torch.float16, "matmul") == 1e9
