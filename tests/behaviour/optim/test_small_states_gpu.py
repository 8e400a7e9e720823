"""Small and far optimizer states on a GPU: kernels against plain torch, transfers against none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from fsdmoe.kernels.adamw_step import AdamWStep, adamw_small_reference_
from fsdmoe.optim import AdamW, clip_grad_norm, moments, state_stream
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.block_floats import BlockFloats, ElementPlace, num_blocks, read
from fsdmoe.testing import requires_gpu
from tests.support.moment_case import backward, build, state_of, step

pytestmark = requires_gpu


def zeros(num_elements: int) -> BlockFloats:
    codes = torch.zeros(num_elements, dtype=torch.uint8, device="cuda")
    return BlockFloats(codes, torch.zeros(num_blocks(num_elements), dtype=torch.uint8, device="cuda"))


def test_the_kernel_keeps_to_plain_torch_for_many_steps() -> None:
    from fsdmoe.kernels.triton import adamw_

    num_elements, place = 3 * 2048 + 64 * 3 + 7, ElementPlace(5, 640, 1 << 20, 1 << 33, 1 << 34)
    generator = torch.Generator("cuda").manual_seed(0)
    mains = [torch.randn(num_elements, device="cuda", generator=generator)] * 2
    mains = [main.clone() for main in mains]
    pairs = [(zeros(num_elements), zeros(num_elements)) for _ in mains]
    weight = torch.empty(num_elements, dtype=torch.bfloat16, device="cuda")
    for number in range(1, 9):
        grad = torch.randn(num_elements, device="cuda", generator=generator) * 1e-3
        settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        settings["step"] = torch.tensor(float(number), device="cuda")
        adamw_(mains[0], grad, *pairs[0], AdamWStep(**settings), place=place, weight=weight)
        adamw_small_reference_(mains[1], grad, *pairs[1], AdamWStep(**settings), place)
    torch.testing.assert_close(mains[0], mains[1], rtol=1e-4, atol=3e-4)
    for ours, theirs, signed in zip(*pairs, (True, False), strict=True):
        apart = read(ours, signed=signed) != read(theirs, signed=signed)
        assert apart.float().mean() < 0.02  # where the last bit of a sum decides about rounding up
    assert torch.equal(weight, mains[0].bfloat16())


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Meshes of this process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def slow_copy(*arguments: Any) -> None:
    torch.cuda._sleep(1_000_000)  # updates and copies lag behind what the host has issued
    copy(*arguments)


copy = state_stream._copy


def train(share: float, formats: Any, prefetched: float = 0.5) -> tuple[list[float], dict[str, str]]:
    """The loss of every step, and the state after the last."""
    model = build({})
    optimizer = AdamW(
        model,
        lr=1e-2,
        betas=(0.9, 0.95),
        moment_dtype=formats,
        state_offload=share,
        state_prefetch=prefetched,
    )
    small = mock.patch.multiple(state_stream, CHUNK=4160, _copy=slow_copy)
    with small, mock.patch.object(moments, "CHUNK", 4160):
        losses = [step(model, optimizer, number, max_norm=1.0) for number in range(4)]
        losses.append(step(model, optimizer, 4))
        return [loss.item() for loss in losses], state_of(model, optimizer)


@pytest.mark.parametrize("formats", [torch.float32, torch.bfloat16, "float8"])
def test_moments_that_travel_are_the_same_bits(formats: Any) -> None:
    wanted = train(0.0, formats)
    for share, prefetched in ((0.6, 0.5), (1.0, 0.0), (1.0, 1.0)):
        assert train(share, formats, prefetched) == wanted


def test_gradients_in_bfloat16_are_clipped_by_a_factor_in_float32() -> None:
    model = build({}, PrecisionConfig(param_dtype="float32", grad_dtype="bfloat16"))
    backward(model)
    pieces = [parameter.grad.to_local() for parameter in model.parameters()]
    assert {piece.dtype for piece in pieces} == {torch.bfloat16}
    before = [piece.float() for piece in pieces]
    norm = clip_grad_norm(model, 0.1).total
    assert norm > 0.2
    for piece, was in zip(pieces, before, strict=True):
        assert torch.equal(piece, (was * (0.1 / (norm + 1e-6))).bfloat16())


def test_gradients_are_not_written_while_a_late_update_reads_them() -> None:
    found = []
    for share in (0.0, 1.0):
        model = build({})
        optimizer = AdamW(model, lr=1e-2, state_offload=share)
        small = mock.patch.multiple(state_stream, CHUNK=4160, _copy=slow_copy)
        with small, mock.patch.object(moments, "CHUNK", 4160):
            backward(model)
            optimizer.step()
            model.zero_grad(set_to_none=False)  # in place, as soon as the step was issued
            for parameter in model.parameters():
                parameter.grad.fill_(1e-3)
            optimizer.step()  # without a forward in between
        found.append(state_of(model, optimizer))
    assert found[0] == found[1]
