"""When a micro-batch is captured, and that the engine goes on from a replay as from the micro-batch itself.

Here a "replay" computes, and the host's notes of it are taken back; the CUDA side is tests/behaviour's."""

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import run_ranks
from tests.support.echo_graphs import train_with_echoes

SHORT: dict[str, Any] = {
    "train__steps": 7, "train__global_batch_size": 6, "train__eval_interval": 5, "train__eval_batches": 1,
    "model__num_hidden_layers": 2,
}  # fmt: skip


def losses(
    folder: Path, world_size: int, most_shapes: int, **overrides: Any
) -> tuple[list[Any], dict[str, int]]:
    folder.mkdir()
    found = run_ranks(train_with_echoes, world_size, str(folder), most_shapes, SHORT | overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row.get("loss"), row.get("grad_norm"), row.get("eval_loss")) for row in rows], found[0]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {}),
    "one rank": (1, {"train__global_batch_size": 3}),
    "reduced last": (2, {"fsdp__reduce": "last"}),
    "kept whole": (2, {"fsdp__reshard_after_forward": "false"}),
    "replicas": (2, {"mesh__dp_outer": 2, "fsdp__shard": "optimizer"}),
    "bf16 exchange": (2, {"fsdp__grad_exchange": "bf16_all_to_all"}),
}


@pytest.mark.parametrize(
    "name", ["sharded", *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n != "sharded")]
)
def test_replayed_micro_batches_train_as_plain_ones_do(tmp_path: Path, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    plain, _ = losses(tmp_path / "plain", world_size, 0, **overrides)
    replayed, found = losses(tmp_path / "replayed", world_size, 4, **overrides)
    assert len(plain) == 9  # with two evaluations
    assert replayed == plain
    assert found["graphs"] >= 3  # the first of a step, the next, the last
    assert found["replays"] > 0
