"""Predicted seconds against measured ones, and what must grow with what."""

from dataclasses import replace
from typing import Any

import pytest

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp.config import FSDPConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Degrees
from fsdmoe.models import preset_config
from fsdmoe.models.flops import forward_flops_per_token
from fsdmoe.optim.config import OptimConfig
from fsdmoe.plan import GPUS, Job, Setting
from fsdmoe.plan.job import memory_plan
from fsdmoe.plan.overlap import Side, unhidden, unhidden_in_sub_batches
from fsdmoe.plan.step_time import estimate_time
from fsdmoe.precision.config import PrecisionConfig

ALONE = Degrees(1, 1, 1, 1, 1, 1, 1)
BF16 = PrecisionConfig(main_dtype="bfloat16", reduce_dtype="bfloat16")


def qwen(num_layers: int, batch: int) -> Job:
    model = preset_config("qwen3-30b-a3b", num_hidden_layers=num_layers)
    return Job(model, 4096, batch)


def test_the_measured_step_of_one_gpu_is_predicted_within_five_percent() -> None:
    """docs/results/train_step.md: 200.5 ms."""
    setting = Setting(
        degrees=ALONE, micro_batch_size=4, memory=MemoryConfig(recompute=("norms",)), precision=BF16,
        optim=OptimConfig(moment_dtype="bfloat16"),
    )  # fmt: skip
    assert estimate_time(qwen(8, 4), setting, GPUS["h200"]).total == pytest.approx(0.2005, rel=0.05)


@pytest.mark.parametrize(("plain", "measured"), [(False, 0.1973), (True, 0.2586)])
def test_the_measured_steps_of_a_wrapped_model_are_predicted_within_five_percent(
    plain: bool, measured: float
) -> None:
    """docs/results/train_step.md: 197.3 ms with fused layers, 258.6 without."""
    job = replace(qwen(8, 4), is_wrapped=True, has_plain_layers=plain)
    setting = Setting(
        degrees=ALONE, micro_batch_size=4, precision=BF16, optim=OptimConfig(moment_dtype="bfloat16")
    )
    assert estimate_time(job, setting, GPUS["h200"]).total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("parts", "milliseconds"), [(("layer",), 1034), ((), 759)])
def test_measured_steps_of_adapters_are_predicted_within_six_percent(
    parts: tuple[Any, ...], milliseconds: float
) -> None:
    """docs/results/adapters.md: 16,384 tokens."""
    job = replace(qwen(48, 4), is_wrapped=True, has_adapters=True)
    setting = Setting(degrees=ALONE, micro_batch_size=4, memory=MemoryConfig(recompute=parts))
    assert estimate_time(job, setting, GPUS["h200"]).total == pytest.approx(milliseconds / 1e3, rel=0.06)


def test_graphs_leave_the_host_out_of_chunks() -> None:
    """docs/results/emulated_run.md: 942.7 ms with six chunks in a graph, where the host would take 1,570."""
    mesh = Degrees(1, 8, 1, 1, 1, 8, 1)
    setting = Setting(degrees=mesh, micro_batch_size=4, experts=ExpertsConfig(chunks=6), precision=BF16)
    job, gpu = qwen(48, 32), replace(GPUS["h200"], nvlink=1e15)
    launched = estimate_time(job, setting, gpu).total
    assert launched > 1.5 * estimate_time(job, replace(setting, is_replayed=True), gpu).total


def test_attention_that_is_recomputed_costs_a_forward() -> None:
    """docs/results/memory.md: 8.7 ms of 199.3."""
    setting = Setting(degrees=ALONE, micro_batch_size=4, memory=MemoryConfig(recompute=("attention",)))
    assert estimate_time(qwen(8, 4), setting, GPUS["h200"]).recompute == pytest.approx(8.7e-3, rel=0.2)


def test_each_thing_costs_what_it_should() -> None:
    gpu, job = GPUS["h100"], qwen(48, 256)
    wide, far = Degrees(1, 64, 1, 1, 8, 8, 1), Degrees(1, 64, 1, 1, 1, 64, 1)
    near = estimate_time(job, Setting(degrees=wide), gpu)
    beyond = estimate_time(job, Setting(degrees=far), gpu)
    assert beyond.experts > 3 * near.experts, "an exchange beyond the NVLink domain"
    layer = estimate_time(job, Setting(degrees=wide, memory=MemoryConfig(recompute=("layer",))), gpu)
    tokens = job.tokens_per_step / 64
    attention = forward_flops_per_token(job.model, job.seq_len).attention * tokens / gpu.attention
    forward = (near.compute - job_head(job, gpu.matmul)) / 3
    assert layer.recompute == pytest.approx(forward - 0.3 * attention, rel=1e-6), "attention alone is faster"
    norms = estimate_time(job, Setting(degrees=wide, memory=MemoryConfig(recompute=("norms",))), gpu)
    assert 0 < norms.recompute < 0.05 * near.total
    slow = estimate_time(job, Setting(degrees=wide), replace(gpu, network=gpu.network / 20))
    assert slow.sharding > near.sharding


def test_moments_in_host_memory_cost_what_the_link_cannot_carry_in_time() -> None:
    job = qwen(8, 4)

    def setting(share: float, ring: float) -> Setting:
        optim = OptimConfig(moment_dtype="bfloat16", state_offload=share, state_prefetch=ring)
        return Setting(degrees=ALONE, micro_batch_size=4, precision=BF16, optim=optim)

    def waits(share: float, ring: float) -> float:
        return estimate_time(job, setting(share, ring), GPUS["h200"]).offload

    assert waits(0.35, 1.0) == 0, "everything has come by the time of the update"
    late = 0.25 * memory_plan(job, setting(0.35, 1.0)).host_moments
    longer = waits(0.35, 0.25) - waits(0.35, 0.5)
    assert longer == pytest.approx(late / GPUS["h200"].host_link, rel=1e-6)
    assert waits(1.0, 1.0) > 0, "more than the link carries in a step"


def test_chunks_hide_what_compute_can_cover_and_cost_a_little() -> None:
    assert unhidden(1, 2, 10, 0, chunks=1) == 3
    assert unhidden(1, 1, 10, 0, chunks=4) == pytest.approx(2 / 6)  # half a middle chunk out, and back
    assert unhidden(1, 1, 10, 1, chunks=4) == pytest.approx(1 / 6), "shared experts cover the way out"
    assert unhidden(5, 5, 1, 0, chunks=8) >= 9, "nothing covers what takes longer than compute"
    gpu, job, mesh = GPUS["h100"], qwen(48, 256), Degrees(1, 64, 1, 1, 8, 8, 1)
    many, few = (
        [Setting(degrees=mesh, micro_batch_size=size, experts=ExpertsConfig(chunks=n)) for n in (1, 2, 4)]
        for size in (16, 1)
    )
    one, two, four = (estimate_time(job, setting, gpu) for setting in many)
    assert four.experts < two.experts < one.experts
    assert estimate_time(job, few[2], gpu).experts > estimate_time(job, few[0], gpu).experts, (
        "host's launches"
    )
    assert four.compute == one.compute
    alone = replace(many[2], degrees=ALONE)
    assert estimate_time(job, alone, gpu).experts == 0


def test_kept_weights_are_gathered_once_a_step_and_kept_gradients_reduced_once() -> None:
    """On the slow links of cards, where compute hides little of it."""
    mesh = Degrees(1, 64, 1, 1, 64, 1, 1)

    def waits(rows: int, **fsdp: object) -> float:
        setting = Setting(degrees=mesh, fsdp=FSDPConfig(**fsdp))  # type: ignore[arg-type]
        return estimate_time(qwen(8, 64 * rows), setting, GPUS["l40s"]).sharding

    one = waits(1)
    assert waits(1, reduce="last") == pytest.approx(one), "one micro-batch has nothing to save"
    assert 0.3 * one < waits(1, reshard_after_forward=False) < 0.9 * one
    assert one < waits(4, reduce="last") < 0.9 * waits(4)
    assert one / 2 < waits(4, reduce="last", reshard_after_forward=False) < 2 * one


def test_sub_batches_hide_behind_both_halves_of_a_layer() -> None:
    assert unhidden_in_sub_batches(Side(1, 2), Side(1, 3), 1) == pytest.approx(5), "nothing else to compute"
    assert unhidden_in_sub_batches(Side(6, 1), Side(4, 1), 2) == pytest.approx(0), "compute is longer"
    assert unhidden_in_sub_batches(Side(1, 6), Side(1, 6), 2) == pytest.approx(10), "links are longer"
    late = unhidden_in_sub_batches(Side(2, 4), Side(1, 4, after=1), 2)
    assert late == pytest.approx(4), "whatever the order, links are never idle"
    none = unhidden_in_sub_batches(Side(0, 4, before=1), Side(3, 4), 1)
    assert none == pytest.approx(7), "what needs no rows is computed while they travel"


def test_the_measured_steps_of_an_emulated_fabric_are_predicted_within_five_percent() -> None:
    """docs/results/emulated_run.md, layers of DeepSeek-V3 over 8 nodes: two chunks 2,098.7 ms, two
    sub-batches 1,859.9."""
    model = preset_config("deepseek-v3", num_hidden_layers=22, num_nextn_predict_layers=0)
    job = Job(model, 4096, 128)
    gpu = replace(GPUS["h200"], nvlink=300e9, network=50e9)

    def seconds(**experts: int) -> float:
        setting = Setting(
            degrees=Degrees(1, 64, 1, 1, 1, 64, 1), micro_batch_size=2, precision=BF16,
            optim=OptimConfig(moment_dtype="bfloat16"), experts=ExpertsConfig(**experts),  # type: ignore[arg-type]
        )  # fmt: skip
        return estimate_time(job, setting, gpu).total

    assert seconds(chunks=2) == pytest.approx(2.0987, rel=0.05)
    assert seconds(sub_batches=2) == pytest.approx(1.8599, rel=0.05)
    assert seconds(chunks=2) / seconds(sub_batches=2) == pytest.approx(2.0987 / 1.8599, rel=0.05)
    assert seconds(sub_batches=2) < min(seconds(chunks=chunks) for chunks in (1, 2, 4, 8))


def job_head(job: Job, rate: float) -> float:
    """Seconds of the head in a step of 64 ranks."""
    tokens = job.tokens_per_step / 64
    return 6 * job.model.hidden_size * job.model.vocab_size * tokens / rate
