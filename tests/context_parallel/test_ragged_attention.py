"""What cuDNN's attention to packed documents is built for; its results are in the GPU tests."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.context_parallel.blocks import Block, whole_rows
from fsdmoe.context_parallel.ragged_attention import _RaggedShape, takes


def block_of(lengths: list[int]) -> Block:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Block(None, None, ends, ends, tuple(lengths), tuple(lengths), causal=True)


def shape_of(lengths: list[int]) -> _RaggedShape:
    q, k, v = (torch.empty(sum(lengths), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    return _RaggedShape.of(q, k, v, block_of(lengths), 0.125)


def test_batches_with_other_documents_share_a_plan() -> None:
    assert shape_of([4000, 96]) == shape_of([2100, 500, 1496]) == shape_of([3000, 548, 548])
    assert shape_of([3000] + [137] * 8) != shape_of([4000, 96]), "more documents than the smallest plan has"
    assert shape_of([4096, 4096]).tokens == 8192


@pytest.mark.parametrize(
    ("block", "is_taken"),
    [
        (block_of([3, 5]), True),
        (whole_rows(2, 4, torch.device("cpu")), True),
        (block_of([3, 5]).windowed(2), False),
        (Block(None, None, *[torch.tensor([0, 3, 8])] * 2, (3, 5), (4, 5), causal=True), False),
        (Block(None, None, *[torch.tensor([0, 3, 8])] * 2, (3, 5), (3, 5), causal=False), False),
    ],
)
def test_documents_whose_queries_see_their_own_keys_are_taken(block: Block, is_taken: bool) -> None:
    q = torch.empty(8, 4, 64)
    assert takes(q, q, block) == is_taken


def test_offsets_that_do_not_fit_32_bits_are_left_to_another_kernel() -> None:
    q = torch.empty(1 << 17, 128, 192, device="meta")
    assert not takes(q, q, block_of([1 << 17]))
