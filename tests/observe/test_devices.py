"""Peaks by device name, or the reason why there is none; memory in use."""

import resource
from types import SimpleNamespace

import pytest
import torch

from fsdmoe.observe import ObserveConfig
from fsdmoe.observe.devices import device_name, find_peak, peak_for, peak_memory_gib


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_known_device_name_gives_its_own_row(name, bf16):
    assert find_peak(name).bf16 == bf16


@pytest.mark.parametrize("name", ["NVIDIA H2000", "NVIDIA XA100", "Tesla K80", "CPU", ""])
def test_a_name_that_only_contains_a_known_one_is_unknown(name):
    assert find_peak(name) is None


@pytest.mark.parametrize(("precision", "tflops"), [("bf16", 989.5), ("fp8", 1979.0), ("fp32", 67.0)])
def test_the_peak_follows_the_configured_precision(precision, tflops):
    assert peak_for(ObserveConfig(peak_precision=precision), "NVIDIA H200").tflops == tflops


def test_no_peak_comes_with_the_reason():
    assert peak_for(ObserveConfig(), "CPU").tflops is None
    unknown = peak_for(ObserveConfig(), "Abacus 3000")
    assert unknown.tflops is None
    assert "'Abacus 3000'" in unknown.reason
    assert "observe.peak_tflops" in unknown.reason
    without_fp8 = peak_for(ObserveConfig(peak_precision="fp8"), "NVIDIA A100-SXM4-80GB")
    assert without_fp8.tflops is None
    assert "fp8" in without_fp8.reason


def test_a_configured_peak_goes_before_the_table():
    assert peak_for(ObserveConfig(peak_tflops=700.0), "NVIDIA H200").tflops == 700.0
    assert peak_for(ObserveConfig(peak_tflops=1.5), "CPU").tflops == 1.5


@pytest.mark.parametrize(("platform", "told"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_the_memory_of_a_process_is_its_peak_resident_size(monkeypatch, platform, told):
    cpu = torch.device("cpu")
    assert device_name(cpu) == "CPU"
    usage = {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=told)}
    monkeypatch.setattr("fsdmoe.observe.devices.resource.getrusage", usage.__getitem__)
    monkeypatch.setattr("fsdmoe.observe.devices.sys.platform", platform)
    assert peak_memory_gib(cpu) == 3.0
