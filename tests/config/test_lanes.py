"""What lanes do not go with is refused before anything is built, by its key, with the fix."""

from typing import Any

import pytest

from tests.support.config_building import build

LANES: dict[str, Any] = {
    "mesh": {"ep": 2}, "experts": {"lanes": 2}, "train": {"micro_batch_size": 2, "global_batch_size": 4},
}  # fmt: skip
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "train.micro_batch_size": {"train": {"micro_batch_size": 1}},
    "train.compile": {"train": {"compile": True}},
    "train.graphs": {"train": {"graphs": "layer"}},
    "experts.chunks": {"experts": {"chunks": 2}},
    "experts.dispatcher": {"experts": {"dispatcher": "flex"}},
    "experts.record": {"experts": {"record": "somewhere"}},
    "experts.balance.global_batch": {"experts": {"balance": {"global_batch": 0.01}}},
    "memory.recompute": {"memory": {"recompute": ["layer"]}},
    "memory.offload": {"memory": {"offload": ["qkv"]}},
    "context_parallel.dynamic": {"context_parallel": {"dynamic": True}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_lanes_do_not_go_with_is_refused_by_its_key(key: str) -> None:
    mapping = {name: LANES.get(name, {}) | REFUSED[key].get(name, {}) for name in LANES | REFUSED[key]}
    config, problems = build(mapping, 2)
    assert config is None
    (found,) = [line for line in problems if line.startswith("experts.lanes: ")]
    assert f"got {key} = " in found
    assert f"set {key} = " in found


def test_parts_that_are_recomputed_and_split_rows_go_with_lanes() -> None:
    for changed in ({"memory": {"recompute": ["norms", "experts"]}}, {"mesh": {"ep": 2, "cp": 2}}):
        config, problems = build(LANES | changed, 2)
        assert config is not None, problems


def test_no_lanes_are_fewer_than_one() -> None:
    _, problems = build({"experts": {"lanes": 0}})
    assert any(line.startswith("experts.lanes: expected 1 or more, got 0") for line in problems)
