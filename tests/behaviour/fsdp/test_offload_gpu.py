"""Gradients that live in host memory, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import requires_gpu
from tests.behaviour.fsdp.test_gradients import FP32, Model, rows
from tests.support.one_gpu import run_ranks_on_one_gpu


def offload() -> None:
    """On a GPU: gradients that live in host memory, over several steps and micro-batches."""
    width = 2048  # large enough that a copy to the host takes its time
    plain = Model(width=width).cuda()
    policy = FSDPPolicy(fsdp=FSDPConfig(cpu_offload=True), precision=FP32, grad_divisor=4.0)
    model = fully_shard(copy.deepcopy(plain), build_meshes(), policy)
    for step, micro_batches in enumerate((1, 2, 1, 2)):
        plain.zero_grad()
        engine_of(model).zero_grad()
        for micro in range(micro_batches):
            for rank in range(dist.get_world_size()):
                (plain(rows(2 * step + micro, rank, width).cuda()) / 4).backward()
            with engine_of(model).micro_batch(last=micro == micro_batches - 1):
                model(rows(2 * step + micro, width=width).cuda()).backward()
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            whole = ours.grad.full_tensor().cuda()  # type: ignore[union-attr]
            ratio = (whole.norm() / theirs.grad.norm()).item()  # type: ignore[union-attr]
            assert abs(ratio - 1) < 1e-3, f"step {step}: a gradient is {ratio:.3f} times what it should be"
            difference = (whole - theirs.grad).norm() / theirs.grad.norm()  # type: ignore[union-attr]
            assert difference < 1e-3
    print("offloaded gradients are right")


@requires_gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_gradients_are_those_of_the_plain_model(world_size: int) -> None:
    printed = run_ranks_on_one_gpu(
        world_size, "-c", "from tests.behaviour.fsdp.test_offload_gpu import offload; offload()"
    )
    assert printed.count("offloaded gradients are right") == world_size
