"""Layers whose attention is replayed train as those whose is not; the CUDA side is tests/behaviour's."""

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import run_ranks
from tests.support.echo_graphs import train_with_echoes
from tests.support.echo_layers import train_with_layer_echoes

SHORT: dict[str, Any] = {
    "train__steps": 4, "train__global_batch_size": 4, "train__eval_interval": 3, "train__eval_batches": 1,
    "model__num_hidden_layers": 2,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "all_to_all": (2, {"mesh__ep": 2, "experts__dispatcher": "all_to_all"}),
    "one rank": (1, {"train__global_batch_size": 2}),
    "reduced last": (2, {"fsdp__reduce": "last"}),
    "one micro-batch": (2, {"train__global_batch_size": 2}),
    "kept whole": (2, {"fsdp__reshard_after_forward": "false"}),
    "recomputed experts": (2, {"mesh__ep": 2, "memory__recompute": '["experts", "router"]'}),
    "latent attention, MTP": (
        2, {"model__preset": "tiny-deepseek-v3", "model__num_nextn_predict_layers": 1, "mesh__ep": 2},
    ),
    "biases": (2, {"model__attention_bias": "true", "mesh__ep": 2}),
    "plain SGD": (2, {"mesh__ep": 2, "optim__name": "sgd", "optim__lr": 0.1}),
}  # fmt: skip


def rows(folder: Path) -> list[Any]:
    return [
        (row.get("loss"), row.get("grad_norm"), row.get("eval_loss"))
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    "name", ["all_to_all", *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n != "all_to_all")]
)
def test_replayed_attention_trains_as_it_does_without_graphs(tmp_path: Path, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    for folder in ("plain", "layers"):
        (tmp_path / folder).mkdir()
    run_ranks(train_with_echoes, world_size, str(tmp_path / "plain"), 0, SHORT | overrides)
    found = run_ranks(train_with_layer_echoes, world_size, str(tmp_path / "layers"), 4, SHORT | overrides)
    plain = rows(tmp_path / "plain")
    assert len(plain) == 6  # with two evaluations
    assert rows(tmp_path / "layers") == plain
    for num_replays, num_graphs, is_closed in found:
        assert num_replays >= 2 * 2  # of two steps and two layers
        assert num_graphs >= 2 * 2
        assert is_closed
