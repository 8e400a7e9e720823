"""Blocks say exactly who sees whom; plain torch computes them exactly; fused kernels get what they want."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.context_parallel import fused_attention, math_attention
from fsdmoe.context_parallel.blocks import Block, build_block
from fsdmoe.context_parallel.split import PADDING, split_documents
from tests.support.attention_reference import relative_error
from tests.support.attention_work import num_pairs


def seen_pairs(block: Block | None, num_queries: int, num_keys: int) -> torch.Tensor:
    """How often each query-key pair occurs in a block."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    if block is None:
        return counts
    queries = torch.arange(num_queries) if block.query_index is None else block.query_index
    keys = torch.arange(num_keys) if block.key_index is None else block.key_index
    for segment in block.segments():
        q, k = queries[segment.query_start : segment.query_end], keys[segment.key_start : segment.key_end]
        visible = torch.ones(len(q), len(k), dtype=torch.int64)
        if block.causal:
            visible = visible.tril(len(k) - len(q))
        counts[q[:, None], k[None]] += visible
    return counts


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]), st.randoms())
def test_the_blocks_of_all_ranks_together_are_the_causal_mask_of_each_document(lengths, size, random) -> None:
    split = split_documents([lengths], size)
    document_RT, position_RT = split.document_RBL[:, 0], split.position_RBL[:, 0]
    if random.random() < 0.5:  # any order of a rank's tokens
        order = torch.tensor(random.sample(range(split.local_len), split.local_len))
        document_RT, position_RT = document_RT[:, order], position_RT[:, order]
    for q in range(size):
        expected = (document_RT[q][:, None] == document_RT.flatten()[None]) & (
            position_RT[q][:, None] >= position_RT.flatten()[None]
        )
        expected &= (document_RT[q] != PADDING)[:, None]
        blocks = [
            build_block(document_RT[q], position_RT[q], document_RT[k], position_RT[k], causal=q == k)
            for k in range(size)
        ]
        counts = torch.cat([seen_pairs(block, split.local_len, split.local_len) for block in blocks], 1)
        assert torch.equal(counts, expected.long())
        everyone = (document_RT.flatten(), position_RT.flatten())
        gathered = build_block(document_RT[q], position_RT[q], *everyone, causal=True)
        assert torch.equal(seen_pairs(gathered, split.local_len, size * split.local_len), expected.long())
        assert sum(num_pairs(block) for block in blocks if block is not None) == int(expected.sum())


def test_a_balanced_split_takes_one_segment_a_document_and_step() -> None:
    split = split_documents([[64, 32]], 4)
    tokens = [(split.document_RBL[r, 0], split.position_RBL[r, 0]) for r in range(4)]
    own = build_block(*tokens[1], *tokens[1], causal=True)
    earlier, later = (build_block(*tokens[1], *tokens[k], causal=False) for k in (0, 3))
    assert own is not None
    assert earlier is not None
    assert later is not None
    assert own.query_index is None
    assert (own.query_lengths, own.key_lengths) == ((16, 8), (16, 8))
    assert (earlier.query_lengths, earlier.key_lengths) == ((16, 8), (8, 4))
    assert (later.query_lengths, later.key_lengths) == ((8, 4), (16, 8))
    assert num_pairs(earlier) == num_pairs(later)


def test_equal_documents_make_a_plain_batch() -> None:
    for size, uniform in (([32, 32], True), ([32, 16], False)):
        split = split_documents([size], 2)
        tokens = [(split.document_RBL[r, 0], split.position_RBL[r, 0]) for r in range(2)]
        own, other = (
            build_block(*tokens[0], *tokens[0], causal=True),
            build_block(*tokens[0], *tokens[1], causal=False),
        )
        assert own is not None
        assert other is not None
        assert own.is_uniform == other.is_uniform == uniform


def test_tiles_do_not_change_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    document, position = torch.zeros(40, dtype=torch.int64), torch.arange(40)
    block = build_block(document[20:], position[20:], document, position, causal=True)
    assert block is not None
    q, k, v, grad = torch.randn(20, 4, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 6), torch.randn(20, 4, 6)
    whole = math_attention.math_forward(q, k, v, block, 0.3)
    whole_grads = math_attention.math_backward(grad, (q, k, v), *whole, block, 0.3)
    monkeypatch.setattr(math_attention, "_MAX_SCORES", 4 * 40 * 7)
    tiled = math_attention.math_forward(q, k, v, block, 0.3)
    tiled_grads = math_attention.math_backward(grad, (q, k, v), *tiled, block, 0.3)
    for found, expected in zip((*tiled, *tiled_grads), (*whole, *whole_grads), strict=True):
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize(
    ("width", "value_width", "num_kv_heads"), [(128, 128, 2), (192, 128, 8), (100, 104, 8)]
)
def test_fused_kernels_are_called_with_arguments_that_torch_accepts(
    kernel: fused_attention.Kernel, width: int, value_width: int, num_kv_heads: int
) -> None:
    split = split_documents([[64, 64]], 2)
    tokens = [(split.document_RBL[r, 0], split.position_RBL[r, 0]) for r in range(2)]
    block = build_block(*tokens[1], *tokens[0], causal=False)
    assert block is not None
    meta = torch.device("meta")
    block = dataclasses.replace(block.to(meta), query_index=None, key_index=None)
    q = torch.empty(sum(block.query_lengths), 8, width, dtype=torch.bfloat16, device=meta)
    k = torch.empty(sum(block.key_lengths), num_kv_heads, width, dtype=torch.bfloat16, device=meta)
    v = torch.empty(sum(block.key_lengths), num_kv_heads, value_width, dtype=torch.bfloat16, device=meta)
    out, lse = fused_attention.fused_forward(q, k, v, block, 0.1, kernel)
    assert out.shape == (*q.shape[:2], value_width)
    assert lse.shape == q.shape[:2]
    grads = fused_attention.fused_backward(torch.empty_like(out), (q, k, v), out, lse, block, 0.1, kernel)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def test_the_cpu_has_no_fused_kernel() -> None:
    document, position = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    block = build_block(document, position, document, position, causal=True)
    assert block is not None
    q = torch.randn(4, 2, 8, dtype=torch.bfloat16)
    assert fused_attention.choose_kernel(q, q, block) is None
