"""Grouping assignments: every one has its slot, groups are contiguous, sums undo the copies."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.kernels.permute import (
    RowPermutation,
    group_assignments,
    put_assignments,
    sum_rows,
    take_assignments,
    take_rows,
    unpermute,
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    num_rows, num_ids, num_groups = draw(st.integers(0, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ids = draw(
        st.lists(st.integers(-1, num_groups - 1), min_size=num_rows * num_ids, max_size=num_rows * num_ids)
    )
    return torch.tensor(ids, dtype=torch.int64).view(num_rows, num_ids), num_groups


@settings(deadline=None, max_examples=200)
@given(tables(), st.booleans())
def test_groups_are_contiguous_and_in_row_order(table: tuple[torch.Tensor, int], exact: bool) -> None:
    ids_RK, num_groups = table
    num_assigned = int((ids_RK >= 0).sum())
    bound = num_assigned if exact else None
    p = group_assignments(ids_RK, num_groups, max_assignments=bound)
    sources, ends, start = p.sources_M.tolist(), p.ends_G.tolist(), 0
    for group, end in enumerate(ends):
        members = (ids_RK.flatten() == group).nonzero().flatten().tolist()
        assert sources[start:end] == members
        assert p.groups_M().tolist()[start:end] == [group] * (end - start)
        start = end
    assert all(source == -1 for source in sources[start:])
    assert len(sources) == (num_assigned if exact else ids_RK.numel())
    flat_slots = p.slots_RK.flatten().tolist()
    assert all(sources[slot] == i for i, slot in enumerate(flat_slots) if slot >= 0)
    assert [slot >= 0 for slot in flat_slots] == (ids_RK.flatten() >= 0).tolist()


def _example() -> tuple[torch.Tensor, RowPermutation]:
    ids_RK = torch.tensor([[2, 0, -1], [-1, -1, -1], [0, 2, 3], [2, -1, 0]])
    return ids_RK, group_assignments(ids_RK, 5)


def test_the_tail_never_reaches_a_sum() -> None:
    ids_RK, p = _example()
    y_MD = torch.ones(p.num_slots, 3)
    y_MD[int(p.ends_G[-1]) :] = torch.nan
    assert torch.equal(sum_rows(y_MD, p)[:, 0], (ids_RK >= 0).sum(1).float())
    weights_RK = torch.rand(4, 3)
    expected = weights_RK.masked_fill(ids_RK < 0, 0).sum(1)
    torch.testing.assert_close(sum_rows(y_MD, p, weights_RK)[:, 0], expected)


def test_values_of_assignments_go_there_and_back() -> None:
    ids_RK, p = _example()
    values_RK = torch.rand(4, 3)
    back = put_assignments(take_assignments(values_RK, p), p)
    assert torch.equal(back, values_RK.masked_fill(ids_RK < 0, 0))


def test_rows_are_summed_back_and_their_gradient_is_copied() -> None:
    ids_RK, p = _example()
    x = torch.randn(4, 3, dtype=torch.float64)
    copies = take_rows(x, p).requires_grad_()
    sums = unpermute(copies, p)
    torch.testing.assert_close(sums, x * (ids_RK >= 0).sum(1, keepdim=True))
    grad = torch.randn_like(sums)
    sums.backward(grad)
    assert copies.grad is not None
    end = int(p.ends_G[-1])
    torch.testing.assert_close(copies.grad[:end], take_rows(grad, p)[:end])


def test_bf16_rows_are_summed_in_fp32() -> None:
    p = group_assignments(torch.zeros(1, 257, dtype=torch.int64), 1)
    ones = torch.ones(257, 1, dtype=torch.bfloat16)
    assert sum_rows(ones * 0.01, p).item() == torch.tensor(257 * ones[0].mul(0.01).item()).bfloat16().item()
