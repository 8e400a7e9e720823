"""Moments in host memory: the same bits as on the device, through buffers that are made once."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import FSDPPolicy, engine_of
from fsdmoe.fsdp.memory_plan import MomentBytes, PlannedMeshes, plan_memory
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model
from fsdmoe.optim import AdamW, OptimConfig, grad_norm, moments, state_stream
from fsdmoe.optim.moments import MomentPolicy, moment_bytes
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.moment_case import MODEL, State, backward, build, state_of, step


def small_chunks() -> Any:
    """Several chunks a parameter, the last one short."""
    return mock.patch.multiple(state_stream, CHUNK=4096 + 64), mock.patch.multiple(moments, CHUNK=4096 + 64)


def train(share: float, formats: Any, folder: str = "", releases: bool = False) -> State:
    model = build({})
    optimizer = AdamW(model, lr=1e-2, betas=(0.9, 0.95), moment_dtype=formats, state_offload=share)
    first, second = small_chunks()
    with first, second:
        step(model, optimizer, 0, max_norm=1.0)
        if releases:
            assert engine_of(model).release(optimizer) > 0
            assert not any(tensor.untyped_storage().nbytes() for tensor in optimizer.scratch_tensors())
            engine_of(model).restore()
        if folder:  # moments of the next step have come ahead
            checkpoint.save(f"{folder} early", model, optimizer)
        step(model, optimizer, 1, max_norm=1.0)
        backward(model)  # a step that is skipped changes nothing
        next(p for p in model.parameters() if p.piece.numel()).grad.piece[0] = float("inf")
        optimizer.step(found_inf=grad_norm(model).found_inf)
        optimizer.zero_grad()
    if folder:
        checkpoint.save(folder, model, optimizer)
    return state_of(model, optimizer)


def test_where_moments_live_changes_no_bit_of_a_clipped_step_or_of_a_skipped_one() -> None:
    formats = ("float8", torch.float32)
    wanted = run_ranks(train, 2, 0.0, formats)[0]
    assert run_ranks(train, 2, 0.6, formats, "", True)[0] == wanted, "nor does memory that was away"


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
@pytest.mark.parametrize(
    "formats",
    [torch.float32, torch.bfloat16, "float8", ("float8", torch.float32), (torch.bfloat16, "float8")],
)
def test_any_share_of_any_format_on_any_number_of_ranks(formats: Any, share: float, world: int) -> None:
    wanted = run_ranks(train, world, 0.0, formats)[0]
    assert run_ranks(train, world, share, formats, "", True)[0] == wanted


def changed_between_steps(share: float) -> State:
    """Somebody writes the moments of one layer; later, parameters of another take no part in a step."""
    model = build({})
    optimizer = AdamW(model, lr=1e-2, state_offload=share, state_prefetch=1.0)
    first, second = small_chunks()
    with first, second:
        step(model, optimizer, 0)
        for name, parameter in model.named_parameters():
            if "layers.1" in name:
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
        step(model, optimizer, 1)
        backward(model)
        for name, parameter in model.named_parameters():
            if "layers.0.mlp" in name:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 2)
    return state_of(model, optimizer)


def test_what_came_ahead_of_its_step_is_forgotten_when_the_step_is_another() -> None:
    assert run_ranks(changed_between_steps, 1, 1.0)[0] == run_ranks(changed_between_steps, 1, 0.0)[0]


def add_one(chunk: Any) -> None:
    for moment in (chunk.exp_avg, chunk.exp_avg_sq):
        assert torch.all(moment == moment[0])
        moment += 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 120), st.data())
@settings(max_examples=60, deadline=None)
def test_no_two_chunks_that_are_needed_share_a_place(sizes: list[int], space: int, data: Any) -> None:
    """Any chunks, a ring from three of the largest upwards, steps with any of them."""
    stream = state_stream.StateStream(torch.device("cpu"), 256 * max(6 * max(sizes), space))
    chunks = [FakeRange(object(), torch.zeros(64 * size), torch.ones(64 * size)) for size in sizes]
    numbers = [0] * len(sizes)
    for _ in range(4):
        for index in (chosen := sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))):
            numbers[index] += 1
        stream.run([(chunks[index], add_one) for index in chosen])
        assert [chunk.exp_avg[0].item() for chunk in chunks] == numbers
        assert [chunk.exp_avg_sq[0].item() - 1 for chunk in chunks] == numbers


class FakeRange:
    """Of a chunk or less."""

    indices = (0,)

    def __init__(self, group: Any, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        self.group, self.exp_avg, self.exp_avg_sq = group, exp_avg, exp_avg_sq
        self.main = exp_avg

    def part(self, part: slice, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Any:
        return FakeRange(self.group, exp_avg, exp_avg_sq)


def resume(share: float, folder: str) -> State:
    model = build({})
    optimizer = AdamW(model, lr=1e-2, state_offload=share)
    checkpoint.load(folder, model, optimizer)
    return state_of(model, optimizer)


def test_a_checkpoint_does_not_know_where_they_lived(tmp_path: Path) -> None:
    saved = run_ranks(train, 2, 0.6, torch.float32, str(tmp_path / "c"))[0]
    assert run_ranks(train, 2, 0.0, torch.float32)[0] == saved, "a save between steps changes no bit of them"
    assert run_ranks(resume, 1, 0.0, str(tmp_path / "c"))[0] == saved
    assert run_ranks(resume, 3, 0.3, str(tmp_path / "c"))[0] == saved


def planned_and_held(share: float) -> tuple[MomentBytes, MomentBytes, int]:
    """Bytes by the plan, bytes that are held, and of the moments of the largest parameter."""
    meshes = build_meshes()
    planned_model = build_model(MODEL)
    for module in planned_model.modules():
        if isinstance(module, MoE):
            split_experts(module.experts, PlannedMeshes(meshes.degrees))
    policy = MomentPolicy(torch.bfloat16, torch.bfloat16, offload=share)
    sharding = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32"))
    plan = plan_memory(planned_model, meshes.degrees, sharding, moments=moment_bytes(policy))
    model = build({})
    optimizer = AdamW(model, betas=(0.9, 0.95), moment_dtype=torch.bfloat16, state_offload=share)
    step(model, optimizer, 0)
    before = [tensor.data_ptr() for tensor in optimizer.scratch_tensors()]
    step(model, optimizer, 1)
    assert before == [tensor.data_ptr() for tensor in optimizer.scratch_tensors()], "made once"
    largest = max(4 * parameter.piece.numel() for parameter in model.parameters())
    return MomentBytes(plan.moments, plan.host_moments, plan.moment_staging), optimizer.moment_bytes, largest


@pytest.mark.parametrize("share", [0.35, 1.0])
def test_a_plan_counts_both_memories_and_the_buffers(share: float) -> None:
    for rank, (planned, held, largest) in enumerate(run_ranks(planned_and_held, 2, share)):
        assert planned == held or rank, "a plan is of the first rank"
        assert abs(held.host - share * (held.host + held.device)) <= largest / 2
        assert held.staging > 0


def beside_host_shards() -> str:
    with pytest.raises(ConfigError) as error:
        AdamW(build({}, cpu_offload=True), state_offload=0.5)
    return str(error.value)


def test_what_cannot_be_is_refused() -> None:
    words = "optim.state_offload: all moments are in host memory already"
    assert words in run_ranks(beside_host_shards, 1)[0]
    with pytest.raises(ConfigError, match=r"^optim\.state_offload: expected a number 0 to 1, got 35"):
        OptimConfig(state_offload=35)
    with pytest.raises(ConfigError, match=r"^optim\.state_prefetch: expected optim\.state_offload above 0"):
        OptimConfig(state_prefetch=0.25)
