"""cuDNN's attention to packed documents, next to float32 in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.fused_attention import choose_kernel, fused_backward, fused_forward
from fsdmoe.context_parallel.math_attention import math_backward, math_forward
from fsdmoe.context_parallel.ragged_attention import has_frontend
from fsdmoe.testing import requires_gpu

pytestmark = [
    requires_gpu,
    pytest.mark.skipif(not has_frontend(), reason="needs nvidia-cudnn-frontend, the extra cudnn"),
]


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


def check(found: tuple[Tensor, ...], given: tuple[Tensor, ...], block: Block) -> None:
    """Output, log-sum-exps and gradients are as near to float32 as the flash kernel's."""
    q, k, v, grad = (x.float() for x in given)
    out, lse = math_forward(q, k, v, block, 0.1)
    wanted = (out, lse, *math_backward(grad, (q, k, v), out, lse, block, 0.1))
    flash = fused_forward(*given[:3], block, 0.1, "flash")
    flash = (*flash, *fused_backward(given[3], given[:3], *flash, block, 0.1, "flash"))
    for mine, theirs, exact in zip(found, flash, wanted, strict=True):
        error, other = (((x.float() - exact).norm() / exact.norm()).item() for x in (mine, theirs))
        assert error < 1.2 * other + 1e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"),
    [(8, 2, 128, 128), (8, 8, 64, 64), (4, 4, 192, 128), (6, 2, 96, 96)],
)
@pytest.mark.parametrize("lengths", [[700, 1, 1300, 95, 3], [64] * 20, [1024, 5]])
def test_documents_of_any_lengths_equal_float32(
    lengths: list[int], heads: int, kv_heads: int, width: int, value_width: int
) -> None:
    block = exact_block(lengths)
    given = draw(sum(lengths), heads, kv_heads, width, value_width)
    assert choose_kernel(given[0], given[2], block) == "ragged"
    out, lse = fused_forward(*given[:3], block, 0.1, "ragged")
    found = (out, lse, *fused_backward(given[3], given[:3], out, lse, block, 0.1, "ragged"))
    check(found, given, block)


def test_values_may_be_columns_of_a_joint_projection() -> None:
    block = exact_block([300, 212])
    q, k, v, _ = draw(512, 8, 2, 64, 64)
    joint = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    columns = tuple(x.unflatten(1, (-1, 64)) for x in joint.split([512, 128, 128], 1))
    expected = fused_forward(q, k, v, block, 0.1, "ragged")
    out, lse = fused_forward(*columns, block, 0.1, "ragged")
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_captured_call_follows_the_borders_of_each_replay() -> None:
    given = draw(2048, 8, 2, 128, 128)
    borders = [
        torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 900, 2048], [0, 5, 1100])
    ]
    borders = [torch.cat((each, each.new_full((9 - len(each),), 2048))) for each in borders]
    ends = borders[0].clone()
    block = block_of(ends, 2048)

    def run() -> tuple[Tensor, ...]:
        out, lse = fused_forward(*given[:3], block, 0.1, "ragged")
        return (out, lse, *fused_backward(given[3], given[:3], out, lse, block, 0.1, "ragged"))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for each in borders:
        ends.copy_(each)
        graph.replay()
        check(found, given, exact_block(each.diff()[each.diff() > 0].tolist()))


def test_what_it_does_not_take_goes_to_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    block = exact_block([300, 212])
    q, _, v, _ = draw(512, 8, 2, 64, 64)
    assert choose_kernel(q, v, block.windowed(16)) == "flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel(q, v, block) == "flash"
