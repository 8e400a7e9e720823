"""What only a CUDA device can show: kernels in the trace, the allocator's memory, no hidden waits."""

import gzip
import json
import warnings
from pathlib import Path

import pytest
import torch

from fsdmoe.observe import ObserveConfig, Observer, RunFacts, StepRecord
from fsdmoe.observe.devices import device_name, find_peak
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import requires_gpu


def make_observer(folder: Path, **changes) -> Observer:
    config = ObserveConfig(log_interval=4, tensorboard=False, progress="off", **changes)
    facts = RunFacts(
        flops_per_token=1e6, total_steps=100, tokens_per_step=1000, num_ranks=1, device=torch.device("cuda")
    )
    return Observer(config, facts, output_dir=folder, is_main=True)


def make_record(step: int) -> StepRecord:
    loads = {f"layers.{index}": torch.full((4,), 2.0, device="cuda") for index in range(30)}
    return StepRecord(
        step=step, tokens=1000 * step, loss=2.0, lr=1e-3, grad_norm=0.5, seconds=0.25, loads=loads
    )  # fmt: skip


@requires_gpu
def test_the_trace_holds_the_kernels_of_every_chosen_step(tmp_path):
    observer = make_observer(tmp_path, profile=True, profile_start=2, profile_steps=2)
    x = torch.ones(256, 256, device="cuda")
    for step in range(1, 5):
        with observer.step_profile(step):
            x = x @ x / 256
    observer.close("finished")
    (path,) = (tmp_path / "profile").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) >= 4  # a product and a division in each of two steps


@requires_gpu
def test_memory_is_the_allocators_and_mfu_follows_the_table(tmp_path):
    peak = find_peak(device_name(torch.device("cuda")))
    observer = make_observer(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    observer.log_step(make_record(1))
    observer.close("finished")
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["memory_gib"] == pytest.approx(torch.cuda.max_memory_allocated() / 2**30)
    assert row["memory_gib"] >= held.numel() / 2**30
    expected = None if peak is None else pytest.approx(row["tflops"] / peak.bf16)
    assert row["mfu"] == expected


@requires_gpu
def test_the_host_waits_once_for_a_logged_step_and_never_for_another(tmp_path):
    observer = make_observer(tmp_path)
    observer.log_step(make_record(1))
    logged, unlogged = make_record(4), make_record(5)
    torch.cuda.synchronize()
    waits = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for record in (unlogged, logged):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                observer.log_step(record)
            waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [0, 1]
