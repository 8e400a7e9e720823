"""Attention by the kernels of extras, to packed documents and whole rows, next to float32 in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.context_parallel import flash4_attention, fused_attention
from fsdmoe.context_parallel.blocks import Block, whole_rows
from fsdmoe.context_parallel.flash4_attention import has_flash4, takes_rows
from fsdmoe.context_parallel.fused_attention import Kernel, choose_kernel, fused_backward, fused_forward
from fsdmoe.context_parallel.math_attention import math_backward, math_forward
from fsdmoe.context_parallel.ragged_attention import has_frontend
from fsdmoe.models.attention import attend
from fsdmoe.testing import requires_gpu

pytestmark = requires_gpu
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_flash4 = pytest.mark.skipif(not (IS_HOPPER and has_flash4()), reason="needs Hopper and the extra fa4")
needs_frontend = pytest.mark.skipif(
    not (IS_HOPPER and has_frontend()), reason="needs Hopper and the extra cudnn"
)


@pytest.fixture(
    params=[pytest.param("ragged", marks=needs_frontend), pytest.param("flash4", marks=needs_flash4)]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Each in turn, as if the other's extra were not installed."""
    missing = (
        (fused_attention, "has_frontend") if request.param == "flash4" else (flash4_attention, "has_flash4")
    )
    monkeypatch.setattr(*missing, lambda: False)
    return request.param


def block_of(ends: Tensor, longest: int) -> Block:
    """What a graph is given: borders on the device alone."""
    lengths = (longest, *(0 for _ in range(len(ends) - 2)))
    return Block(None, None, ends, ends, lengths, lengths, causal=True)


def exact_block(lengths: list[int]) -> Block:
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return Block(None, None, ends, ends, tuple(lengths), tuple(lengths), causal=True)


def draw(num_tokens: int, heads: int, kv_heads: int, width: int, value_width: int) -> tuple[Tensor, ...]:
    random = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width))
    return tuple(
        torch.randn(num_tokens, *shape, generator=random, device="cuda").bfloat16() for shape in shapes
    )


def run(given: tuple[Tensor, ...], block: Block, kernel: Kernel) -> tuple[Tensor, ...]:
    out, lse = fused_forward(*given[:3], block, 0.1, kernel)
    return (out, lse, *fused_backward(given[3], given[:3], out, lse, block, 0.1, kernel))


def check(found: tuple[Tensor, ...], given: tuple[Tensor, ...], block: Block) -> None:
    """Output, log-sum-exps and gradients are as near to float32 as the flash kernel's."""
    q, k, v, grad = (x.float() for x in given)
    out, lse = math_forward(q, k, v, block, 0.1)
    wanted = (out, lse, *math_backward(grad, (q, k, v), out, lse, block, 0.1))
    for mine, theirs, exact in zip(found, run(given, block, "flash"), wanted, strict=True):
        error, other = (((x.float() - exact).norm() / exact.norm()).item() for x in (mine, theirs))
        assert error < 1.2 * other + 1e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"),
    [(8, 2, 128, 128), (8, 8, 64, 64), (4, 4, 192, 128), (6, 2, 96, 96), (4, 2, 256, 256)],
)
@pytest.mark.parametrize("lengths", [[700, 1, 1300, 95, 3], [64] * 20, [1024, 5]])
def test_documents_of_any_lengths_equal_float32(
    lengths: list[int], heads: int, kv_heads: int, width: int, value_width: int, kernel: Kernel
) -> None:
    block = exact_block(lengths)
    given = draw(sum(lengths), heads, kv_heads, width, value_width)
    assert choose_kernel(given[0], given[2], block) == kernel
    check(run(given, block, kernel), given, block)


def test_values_may_be_columns_of_a_joint_projection(kernel: Kernel) -> None:
    block = exact_block([300, 212])
    q, k, v, _ = draw(512, 8, 2, 64, 64)
    joint = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    columns = tuple(x.unflatten(1, (-1, 64)) for x in joint.split([512, 128, 128], 1))
    expected = fused_forward(q, k, v, block, 0.1, kernel)
    out, lse = fused_forward(*columns, block, 0.1, kernel)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_captured_call_follows_the_borders_of_each_replay(kernel: Kernel) -> None:
    given = draw(2048, 8, 2, 128, 128)
    borders = [
        torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 900, 2048], [0, 5, 1100])
    ]
    borders = [torch.cat((each, each.new_full((9 - len(each),), 2048))) for each in borders]
    ends = borders[0].clone()
    block = block_of(ends, 2048)

    run(given, block, kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(given, block, kernel)
    for each in borders:
        ends.copy_(each)
        graph.replay()
        check(found, given, exact_block(each.diff()[each.diff() > 0].tolist()))


@needs_flash4
@pytest.mark.parametrize("window", [1, 16, 200])
def test_windows(window: int) -> None:
    block = exact_block([700, 1, 300, 95]).windowed(window)
    given = draw(1096, 8, 2, 128, 128)
    assert choose_kernel(given[0], given[2], block) == "flash4"
    check(run(given, block, "flash4"), given, block)


@needs_flash4
@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_other_ranks(causal: bool) -> None:
    """More keys than queries, as blocks of context parallelism have them."""
    queries, keys = (torch.tensor(each).cumsum(0).int().cuda() for each in ([0, 200, 56], [0, 700, 56]))
    block = Block(None, None, queries, keys, (200, 56), (700, 56), causal=causal)
    given = [each[: 256 if row in (0, 3) else 756] for row, each in enumerate(draw(756, 8, 2, 128, 128))]
    check(run(tuple(given), block, "flash4"), tuple(given), block)


@needs_flash4
def test_a_fixed_order_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    block = exact_block([3000, 1000, 96])
    given = draw(4096, 16, 2, 128, 128)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel(given[0], given[2], block) == "flash4"
    first, *others = (run(given, block, "flash4") for _ in range(20))
    check(first, given, block)
    for each in others:
        assert all(map(torch.equal, first, each))


@needs_flash4
@pytest.mark.parametrize(("width", "value_width"), [(128, 128), (192, 128)])
def test_whole_rows(width: int, value_width: int) -> None:
    given = draw(4096, 32, 4, width, value_width)
    *heads, grad = (x.unflatten(0, (1, 4096)).requires_grad_() for x in given)
    assert not takes_rows(heads[0][:, :4000], heads[2][:, :4000])  # too little to do
    out = attend(*heads, None, 0.1)
    assert "FlashAttnFunc" in type(out.grad_fn).__name__
    found = (out, *torch.autograd.grad(out, heads, grad))
    block = whole_rows(1, 4096, out.device)
    lse = fused_forward(*given[:3], block, 0.1, "flash")[1]
    out, *grads = (x.detach().flatten(0, 1) for x in found)
    check((out, lse, *grads), given, block)


@needs_frontend
def test_what_cudnn_does_not_take_goes_to_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4_attention, "has_flash4", lambda: False)
    block = exact_block([300, 212])
    q, _, v, _ = draw(512, 8, 2, 64, 64)
    assert choose_kernel(q, v, block.windowed(16)) == "flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel(q, v, block) == "flash"
