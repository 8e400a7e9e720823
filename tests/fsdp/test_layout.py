"""The planner: every element owned once, no granule cut, starts aligned, little padding."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.fsdp.layout import FlatLayout, Item, align_elements, plan_layout

ALIGN = align_elements(2)


def check(layout: FlatLayout, items: list[Item], align: int = ALIGN) -> None:
    by_name = {item.name: item for item in items}
    assert {segment.name: segment.numel for segment in layout.segments} == {i.name: i.numel for i in items}
    end = 0
    for segment in layout.segments:
        assert segment.start >= end
        assert segment.start % align == 0
        granule = min(by_name[segment.name].granule, segment.numel)
        first = segment.start // layout.slice_numel + 1
        for boundary in range(first * layout.slice_numel, segment.end, layout.slice_numel):
            assert (boundary - segment.start) % granule == 0
        end = segment.end
    assert end <= layout.numel
    assert layout.slice_numel % align == 0
    covered: dict[str, list[tuple[int, int]]] = {item.name: [] for item in items}
    for rank in range(layout.num_ranks):
        used: list[tuple[int, int]] = []
        for piece in layout.owned(rank):
            if piece.numel:
                assert piece.offset + piece.numel <= layout.slice_numel
                used.append((piece.offset, piece.offset + piece.numel))
                covered[piece.name].append((piece.start, piece.end))
        used.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(used))
    for item in items:
        edges = covered[item.name]
        assert [0, *(e for _, e in edges)] == [*(s for s, _ in edges), item.numel]
    pads = list(layout.padding_ranges())
    assert sum(b - a for a, b in pads) == layout.padding


ITEM = st.tuples(st.integers(1, 5000), st.sampled_from([1, 32, 64, 7, 48, 96, 128, 1000, 10**9]))


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=12), st.integers(1, 33))
def test_every_element_is_owned_once_and_no_granule_is_cut(
    raw: list[tuple[int, int]], num_ranks: int
) -> None:
    items = [Item(f"p{i}", numel, granule) for i, (numel, granule) in enumerate(raw)]
    check(plan_layout(items, num_ranks), items)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.integers(1, 1024))
def test_default_granules_waste_less_than_one_granule_a_rank_and_a_parameter(
    sizes: list[int], num_ranks: int
) -> None:
    items = [Item(f"p{i}", numel) for i, numel in enumerate(sizes)]
    layout = plan_layout(items, num_ranks)
    check(layout, items) if num_ranks <= 64 else None
    assert layout.padding < 64 * (num_ranks + len(items))
    assert [segment.name for segment in layout.segments] == [item.name for item in items]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(2, 16))
@settings(deadline=None)
def test_a_whole_tensor_granule_keeps_every_tensor_on_one_rank(sizes: list[int], num_ranks: int) -> None:
    layout = plan_layout([Item(f"p{i}", n, n) for i, n in enumerate(sizes)], num_ranks)
    for i, numel in enumerate(sizes):
        holders = [p for r in range(num_ranks) for p in layout.owned(r) if p.name == f"p{i}" and p.numel]
        assert [p.numel for p in holders] == [numel]


def test_rows_of_different_length_are_never_cut() -> None:
    rows = {"q": (512, 96), "k": (64, 96), "o": (96, 512), "norm": (96,), "gate": (8, 96)}
    items = [Item(name, math.prod(shape), shape[-1]) for name, shape in rows.items()]
    for num_ranks in (2, 3, 8, 16):
        check(plan_layout(items, num_ranks), items)


# Dense parts and the experts of one layer: Qwen3-235B, DeepSeek-V3 (MLA, 32 local experts), Mixtral-8x22B.
H, I = 4096, 1536
QWEN_DENSE = {"q": (8192, H), "k": (512, H), "v": (512, H), "o": (H, 8192), "qn": (128,), "kn": (128,),
              "n1": (H,), "n2": (H,), "gate": (128, H)}  # fmt: skip
D = 7168
DEEPSEEK_DENSE = {"qa": (1536, D), "qan": (1536,), "qb": (24576, 1536), "kva": (576, D), "kvan": (512,),
                  "kvb": (32768, 512), "o": (D, 16384), "n1": (D,), "n2": (D,), "gate": (256, D),
                  "bias": (256,), "sg": (2048, D), "su": (2048, D), "sd": (D, 2048)}  # fmt: skip
M = 6144
MIXTRAL_DENSE = {"q": (M, M), "k": (1024, M), "v": (1024, M), "o": (M, M), "n1": (M,), "n2": (M,),
                 "gate": (8, M)}  # fmt: skip
MODELS = {
    "qwen3-235b": (QWEN_DENSE, {"w13": (128, 2 * I, H), "w2": (128, H, I)}, 94),
    "deepseek-v3": (DEEPSEEK_DENSE, {"w13": (32, 4096, D), "w2": (32, D, 2048)}, 61),
    "mixtral-8x22b": (MIXTRAL_DENSE, {"w13": (8, 2 * 16384, M), "w2": (8, M, 16384)}, 56),
}


@pytest.mark.parametrize("num_ranks", [8, 64, 96, 256, 1024])
@pytest.mark.parametrize("model", MODELS)
def test_padding_of_real_layers_is_next_to_nothing(model: str, num_ranks: int) -> None:
    dense, experts, num_layers = MODELS[model]
    searches = plan_layout.__globals__["_plan"]
    searches.cache_clear()
    for layer in range(num_layers):
        padding = total = 0
        for part in (dense, experts):
            items = [Item(f"{layer}.{name}", math.prod(shape)) for name, shape in part.items()]
            layout = plan_layout(items, num_ranks)
            padding += layout.padding
            total += layout.numel - layout.padding
            if part is dense:
                assert layout.padding / (layout.numel - layout.padding) < (
                    0.015 if num_ranks == 1024 else 0.005
                )
        assert padding / total < 0.005
    assert searches.cache_info().misses == 2, "layers that are alike are planned once"
