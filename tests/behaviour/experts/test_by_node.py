"""``by_node``: rows go to a node once. Ranks of one machine are told that they are on nodes of two."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fsdmoe.testing import run_ranks
from tests.support.moe_case import Case, Layout, check_layout


def _on_nodes(size: int, layout: Layout, cases: list[Case]) -> float:
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    return check_layout(layout, cases)


VARIANTS: tuple[dict[str, Any], ...] = (
    {"bias": True, "weight_after": True},
    {"extras": "shared"},
    {"extras": "latent", "tokens": "one"},
    {"top_k": 1},
    {"top_k": 8},
    {"policy": "expert_choice"},
    {"policy": "padded"},
    {"chunks": 3, "extras": "shared", "routing": "skewed"},
)


def _cases() -> list[Case]:
    routings, tokens = ("random", "skewed", "dropped"), ("even", "uneven", "one")
    plain = [Case("by_node", one, other) for one in routings for other in tokens]
    return plain + [Case("by_node", **options) for options in VARIANTS]


@pytest.mark.parametrize(
    ("world", "node_size", "layout"),
    [(4, 2, Layout(4)), (8, 4, Layout(4, 2, tp=2))],
    ids=str,
)
def test_a_layer_equals_one_process(world: int, node_size: int, layout: Layout) -> None:
    run_ranks(_on_nodes, world, node_size, layout, _cases())
