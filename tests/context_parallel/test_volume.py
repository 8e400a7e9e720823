"""Bytes on the wire and bytes kept, counted where torch sees them, against the closed formulas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.exchange import heads_of_ranks
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.context_parallel.volume import AttentionShape, sent_bytes
from fsdmoe.testing import run_ranks
from tests.support.sent_bytes import SentBytes, sequence_parallel_elements, tensor_parallel_elements

MODES = ("ring", "all_to_all", "all_gather")


def kept_bytes(mode: str, shape: AttentionShape, size: int) -> int:
    """From forward to backward, by the table in docs/context_parallel.md."""
    heads = shape.num_heads + shape.num_kv_heads
    if mode == "all_to_all":  # all tokens of this rank's heads
        heads = size * (
            shape.num_heads // size + len(heads_of_ranks(shape.num_heads, shape.num_kv_heads, size)[0])
        )
    elements = shape.num_tokens * heads * (shape.width + shape.value_width)
    return elements * shape.bytes_per_element + 4 * shape.num_tokens * shape.num_heads


def count(shape: AttentionShape, dtype: torch.dtype) -> dict[str, tuple[int, int, int]]:
    """Bytes sent forward, sent backward, and kept, per mode."""
    size, rank = dist.get_world_size(), dist.get_rank()
    split = split_documents([[shape.num_tokens * size - 5, 5]], size)
    assert split.local_len == shape.num_tokens
    counts = {}
    for mode in MODES:
        torch.manual_seed(rank)
        # Fresh storages: each saved tensor is counted once, by the storage it keeps alive.
        q = torch.randn(1, shape.num_tokens, shape.num_heads, shape.width, dtype=dtype, requires_grad=True)
        k = torch.randn(1, shape.num_tokens, shape.num_kv_heads, shape.width, dtype=dtype, requires_grad=True)
        v = torch.randn(
            1, shape.num_tokens, shape.num_kv_heads, shape.value_width, dtype=dtype, requires_grad=True
        )
        storages: dict[int, int] = {}

        def keep(x: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = (
                x.untyped_storage().nbytes() if x.dtype != torch.int64 else 0
            )
            return x

        with SentBytes() as sent, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = ContextAttention(mode).attend(q, k, v, AttentionPlan(split, dist.group.WORLD), 1.0)
        forward = sent.total
        with SentBytes() as sent:
            out.sum().backward()
        counts[mode] = (forward, sent.total, sum(storages.values()))
    return counts


@pytest.mark.parametrize(
    ("size", "shape", "dtype"),
    [
        (
            2,
            AttentionShape(num_tokens=24, num_heads=4, num_kv_heads=4, width=24, value_width=16),
            torch.bfloat16,
        ),
        (
            4,
            AttentionShape(num_tokens=16, num_heads=8, num_kv_heads=2, width=8, value_width=8),
            torch.bfloat16,
        ),
        (
            3,
            AttentionShape(
                num_tokens=8, num_heads=6, num_kv_heads=2, width=8, value_width=8, bytes_per_element=4
            ),
            torch.float32,
        ),
    ],
    ids=["latent", "replicated_groups", "uneven_groups"],
)
def test_counted_bytes_equal_the_formulas(size: int, shape: AttentionShape, dtype: torch.dtype) -> None:
    expected = {mode: (*sent_bytes(mode, shape, size), kept_bytes(mode, shape, size)) for mode in MODES}
    for counts in run_ranks(count, size, shape, dtype):
        assert counts == expected


@pytest.mark.parametrize(("size", "heads_per_group"), [(2, 1), (4, 4), (8, 2)])
def test_all_to_all_moves_what_the_literature_says(size: int, heads_per_group: int) -> None:
    batch, seq, heads, width = 2, 64, 32, 16
    shape = AttentionShape(
        num_tokens=batch * seq // size, num_heads=heads, num_kv_heads=heads // heads_per_group, width=width,
        value_width=width, bytes_per_element=1,
    )  # fmt: skip
    forward, backward = sent_bytes("all_to_all", shape, size)
    expected = sequence_parallel_elements(batch, seq, heads * width, size, heads_per_group)
    assert forward + backward == expected
    tensor_parallel = tensor_parallel_elements(batch, seq, heads * width, size)
    assert expected / tensor_parallel == (2 + 2 / heads_per_group) / size


def test_all_to_all_beats_the_ring_once_ranks_outnumber_what_it_sends() -> None:
    shape = AttentionShape(num_tokens=1024, num_heads=32, num_kv_heads=8, width=128, value_width=128)
    ratio = {
        size: sent_bytes("all_to_all", shape, size)[0] / sent_bytes("ring", shape, size)[0] for size in (2, 8)
    }
    assert ratio[2] > 1 > ratio[8]
