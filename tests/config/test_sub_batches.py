"""What sub-batches do not go with is refused before anything is built, by its key, with the fix."""

from dataclasses import replace
from typing import Any

import pytest

from fsdmoe.config.sub_batches import check_sub_batches
from fsdmoe.errors import ConfigError
from tests.support.config_building import build

TWO: dict[str, Any] = {
    "mesh": {"ep": 2},
    "experts": {"sub_batches": 2},
    "train": {"micro_batch_size": 2, "global_batch_size": 4},
}
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "train.micro_batch_size": {"train": {"micro_batch_size": 1}},
    "train.graphs": {"train": {"graphs": "layer"}},
    "experts.chunks": {"experts": {"chunks": 2}},
    "experts.dispatcher": {"experts": {"dispatcher": "flex"}},
    "experts.record": {"experts": {"record": "somewhere"}},
    "experts.balance.global_batch": {"experts": {"balance": {"global_batch": 0.01}}},
    "experts.balance.device_scope": {
        "experts": {"balance": {"device": 0.01, "device_scope": "global_batch"}}
    },
    "memory.recompute": {"memory": {"recompute": ["layer"]}},
    "memory.offload": {"memory": {"offload": ["qkv"]}},
    "context_parallel.dynamic": {"context_parallel": {"dynamic": True}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_sub_batches_do_not_go_with_is_refused_by_its_key(key: str) -> None:
    mapping = {name: TWO.get(name, {}) | REFUSED[key].get(name, {}) for name in TWO | REFUSED[key]}
    config, problems = build(mapping, 2)
    assert config is None
    (found,) = [line for line in problems if line.startswith("experts.sub_batches: ")]
    assert f"got {key} = " in found
    assert f"set {key} = " in found


def test_parts_that_are_recomputed_and_split_rows_go_with_them() -> None:
    for changed in ({"memory": {"recompute": ["norms", "experts"]}}, {"mesh": {"ep": 2, "cp": 2}}):
        config, problems = build(TWO | changed, 2)
        assert config is not None, problems


def test_there_is_at_least_one() -> None:
    _, problems = build({"experts": {"sub_batches": 0}})
    assert any(line.startswith("experts.sub_batches: expected 1 or more, got 0") for line in problems)


def test_wrapped_models_are_refused() -> None:
    config, problems = build(TWO, 2)
    assert config is not None, problems
    with pytest.raises(ConfigError, match=r"layers of a wrapped model .* got model\.hf = \"somewhere\""):
        check_sub_batches(replace(config, model=replace(config.model, hf="somewhere")))
