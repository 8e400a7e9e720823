"""Which key-value heads a rank needs, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.context_parallel.config import ContextParallelConfig, check_context_parallel, heads_of_ranks
from fsdmoe.core.errors import ConfigError


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "expected"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (6, 2, 3, [[0, 0], [0, 1], [1, 1]]),
        (4, 4, 1, [[0, 1, 2, 3]]),
        (8, 1, 8, [[0]] * 8),
    ],
)
def test_groups_are_split_shared_or_repeated(num_heads, num_kv_heads, size, expected) -> None:
    assert heads_of_ranks(num_heads, num_kv_heads, size) == expected


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_every_query_head_finds_its_group(num_kv_heads: int, heads_per_group: int, size: int) -> None:
    num_heads = num_kv_heads * heads_per_group
    if num_heads % size:
        with pytest.raises(ConfigError):
            heads_of_ranks(num_heads, num_kv_heads, size)
        return
    per_rank = num_heads // size
    for rank, kv_heads in enumerate(heads_of_ranks(num_heads, num_kv_heads, size)):
        # On the rank, attention pairs query head i with key-value head i // (query heads / key-value heads).
        local = [kv_heads[i // (per_rank // len(kv_heads))] for i in range(per_rank)]
        assert local == [(rank * per_rank + i) // heads_per_group for i in range(per_rank)]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_what_all_ranks_want_is_every_head_equally_often_in_order(
    num_kv_heads: int, heads_per_group: int, size: int
) -> None:
    if num_kv_heads * heads_per_group % size == 0:
        heads = heads_of_ranks(num_kv_heads * heads_per_group, num_kv_heads, size)
        wanted = [h for row in heads for h in row]
        assert wanted == [h for h in range(num_kv_heads) for _ in range(len(wanted) // num_kv_heads)]


def test_heads_that_do_not_divide_name_the_nearest_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"mesh\.cp: .* 12 heads .* choose cp 4 or 6, or context_parallel\.mode ring"
    ):
        heads_of_ranks(12, 4, 5)
    with pytest.raises(ConfigError, match="choose cp 8, or"):
        heads_of_ranks(8, 8, 16)
    with pytest.raises(AssertionError, match="key-value heads that divide 12 heads, got 5"):
        heads_of_ranks(12, 5, 2)


def check(config: ContextParallelConfig, **changes) -> None:
    arguments = {"sizes": (4,), "seq_len": 4096, "num_heads": 8, "num_kv_heads": 2, "tp": 1} | changes
    check_context_parallel(config, **arguments)


def test_illegal_combinations_name_the_nearest_legal_choice() -> None:
    check(ContextParallelConfig())
    check(ContextParallelConfig(mode="all_to_all"))
    check(ContextParallelConfig(mode="ring"), sizes=(3,), seq_len=3000)
    with pytest.raises(
        ConfigError, match=r"data\.seq_len: .* multiple of mesh\.cp \* mesh\.tp = 8, .* 4096 or 4104"
    ):
        check(ContextParallelConfig(), seq_len=4100, tp=2)
    with pytest.raises(ConfigError, match=r"data\.seq_len: .* choose 4$"):
        check(ContextParallelConfig(), seq_len=3)
    with pytest.raises(ConfigError, match=r"mesh\.cp: .* splits 4 heads .* choose cp 4, or"):
        check(ContextParallelConfig(mode="all_to_all"), sizes=(1, 2, 4, 8), tp=2, seq_len=64)
    with pytest.raises(ConfigError, match=r"context_parallel\.max_tokens: .* choose at least 1024, more"):
        check(ContextParallelConfig(dynamic=True, max_tokens=1000))
    with pytest.raises(ConfigError, match=r"context_parallel\.max_tokens: expected 1 or more, got 0"):
        ContextParallelConfig(max_tokens=0)


def test_all_findings_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check(ContextParallelConfig(mode="all_to_all"), sizes=(3,), seq_len=100)
    assert len(caught.value.problems) == 2
