"""Attention over split sequences equals attention in one process, forward and backward, in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdmoe.context_parallel.attention import ContextAttention, attend_here
from fsdmoe.context_parallel.blocks import build_block, whole_rows
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import SequenceSplit, split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import run_ranks
from tests.support.attention_reference import Case, relative_error, whole_gradients

MODES = ("ring", "all_to_all", "all_gather")
SCALE = 0.4
CASES = {
    "one_document": Case(((48,),)),
    "packed_awkward": Case(((13, 1, 7, 2, 25), (1, 1, 1, 44, 1))),
    "shorter_than_the_ranks": Case(((2, 3, 1, 1, 2, 1, 2),)),
    "grouped_heads": Case(((31, 17),), num_heads=12, num_kv_heads=2),
    "latent_widths": Case(((29, 19), (5, 43)), num_heads=12, num_kv_heads=12, width=24, value_width=16),
    "values_wider_than_keys": Case(((20, 4),), num_heads=12, num_kv_heads=4, width=8, value_width=12),
}


def compare_with_one_process(name: str, heads: int | None, modes: tuple[str, ...]) -> dict[str, list[float]]:
    """Errors of out, dq, dk, dv per mode; two micro-batches accumulate into the same leaves."""
    case = CASES[name]
    if heads is not None:
        case = Case(case.rows, heads, heads, case.width, case.value_width)
    expected = whole_gradients(case, SCALE, seeds=(0, 1))
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    split = split_rows(case.document_ids_BS, size)
    errors = {}
    for mode in modes:
        totals = None
        for seed in (0, 1):
            q, k, v, grad = (split.shard(x, rank) for x in case.inputs(seed))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ContextAttention(mode).attend(*leaves, AttentionPlan(split, group), SCALE)
            grads = torch.autograd.grad(out, leaves, grad)
            totals = grads if totals is None else [a + b for a, b in zip(totals, grads, strict=True)]
        found = [split.gather(x, group) for x in (out, *totals)]
        errors[mode] = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
    return errors


def check(name: str, size: int, heads: int | None = None, modes: tuple[str, ...] = MODES) -> None:
    for errors in run_ranks(compare_with_one_process, size, name, heads, modes):
        for mode, values in errors.items():
            assert max(values) < 1e-5, f"{mode}: out, dq, dk, dv off by {values}"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["packed_awkward", "grouped_heads", "latent_widths"])
def test_split_attention_equals_one_process(name: str, size: int) -> None:
    check(name, size, heads=12 if name == "packed_awkward" else None)


@pytest.mark.parametrize("name", ["one_document", "shorter_than_the_ranks"])
def test_documents_that_some_ranks_hold_nothing_of(name: str) -> None:
    check(name, 4)


def test_values_may_be_wider_than_keys() -> None:
    check("values_wider_than_keys", 2)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_split_attention_equals_one_process_on_eight_ranks(name: str) -> None:
    heads = CASES[name].num_heads
    check(name, 8, heads=None if heads % 8 == 0 else 8)
    check(name, 8, modes=("ring", "all_gather"))


def test_one_rank_is_packed_attention_in_every_mode() -> None:
    for case in CASES.values():
        expected = whole_gradients(case, SCALE)
        split = split_rows(case.document_ids_BS, 1)
        for mode in MODES:
            q, k, v, grad = case.inputs()
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ContextAttention(mode).attend(*leaves, AttentionPlan(split), SCALE)
            found = (out, *torch.autograd.grad(out, leaves, grad))
            assert max(relative_error(*pair) for pair in zip(found, expected, strict=True)) < 1e-5


def attend_in_foreign_order(seed: int) -> list[float]:
    """Tokens dealt to ranks at random, in random order: nothing of the zig-zag is left."""
    case = Case(((17, 9, 1, 13), (30, 10)), num_heads=3, num_kv_heads=3)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    plain = split_rows(case.document_ids_BS, 1)
    order = torch.rand(2, 40, generator=torch.Generator().manual_seed(seed)).argsort(1)
    order_RBL = order.view(2, size, -1).transpose(0, 1)
    document, position = (
        torch.stack([x[0].gather(1, rank_order) for rank_order in order_RBL])
        for x in (plain.document_RBL, plain.position_RBL)
    )
    split = SequenceSplit(order_RBL, document, position, plain.seq_len)
    errors = []
    for mode in ("ring", "all_gather"):
        q, k, v, grad = (split.shard(x, rank) for x in case.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ContextAttention(mode).attend(*leaves, AttentionPlan(split, group), SCALE)
        found = [split.gather(x, group) for x in (out, *torch.autograd.grad(out, leaves, grad))]
        errors += [relative_error(*pair) for pair in zip(found, whole_gradients(case, SCALE), strict=True)]
    return errors


def test_any_distribution_of_tokens_gives_the_same_attention() -> None:
    for errors in run_ranks(attend_in_foreign_order, 4, 3):
        assert max(errors) < 1e-5


def attend_in_bf16() -> dict[str, float]:
    case = CASES["packed_awkward"]
    group, rank = dist.group.WORLD, dist.get_rank()
    split = split_rows(case.document_ids_BS, dist.get_world_size())
    errors = {}
    for mode in MODES:
        q, k, v, _ = (split.shard(x, rank).bfloat16() for x in case.inputs())
        out = ContextAttention(mode).attend(q, k, v, AttentionPlan(split, group), SCALE)
        assert out.dtype == torch.bfloat16
        errors[mode] = relative_error(split.gather(out, group), whole_gradients(case, SCALE)[0])
    return errors


def test_bf16_merges_in_fp32() -> None:
    for errors in run_ranks(attend_in_bf16, 2):
        assert max(errors.values()) < 2e-2


def test_autocast_does_not_touch_plain_attention() -> None:
    case = CASES["packed_awkward"]
    q, k, v, grad = case.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ContextAttention().attend(*leaves, AttentionPlan(split_rows(case.document_ids_BS, 1)), SCALE)
        found = (out, *torch.autograd.grad(out, leaves, grad))
    assert max(relative_error(*pair) for pair in zip(found, whole_gradients(case, SCALE), strict=True)) < 1e-5


def test_padding_attends_to_nothing_and_gets_no_gradient() -> None:
    case = Case(((7,),))
    split = split_rows(case.document_ids_BS, 1, multiple_of=4)
    q, k, v, _ = (split.shard(x, 0, fill=1.0).requires_grad_() for x in case.inputs())
    out = ContextAttention().attend(q, k, v, AttentionPlan(split), SCALE)
    out.sum().backward()
    assert split.num_padding == 1
    assert (out[0, -1] == 0).all()
    assert all((x.grad[0, -1] == 0).all() for x in (q, k, v))


def dense_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The definition: a column of sinks beside the masked scores, dropped after the softmax."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.3
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = (distance < 0) | (distance >= (window or q.shape[1]))
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    p = torch.cat((scores.masked_fill(hidden, float("-inf")), column), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhst,bthd->bshd", p, v)


@pytest.mark.parametrize("window", [None, 1, 3, 100], ids=str)
def test_sinks_and_windows_equal_a_softmax_over_one_more_column(window: int | None) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 9, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, torch.randn(4, dtype=torch.float64))]
    *heads, sinks = leaves
    block = whole_rows(2, 9, torch.device("cpu"))
    found, wanted = attend_here(*heads, block, 0.3, sinks, window), dense_with_sinks(*heads, sinks, window)
    gradient = torch.randn_like(wanted)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, leaves, gradient)),
        (wanted, *torch.autograd.grad(wanted, leaves, gradient)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_window_over_keys_of_another_rank_alone_is_an_error() -> None:
    document, position = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1])
    block = build_block(document, position + 2, document, position, causal=False)
    assert block is not None
    with pytest.raises(AssertionError, match="expected keys of consecutive positions"):
        block.windowed(2)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"context_parallel\.mode: expected one of ring, all_to_all, all_gather"
    ):
        ContextAttention("rung")  # type: ignore[arg-type]
