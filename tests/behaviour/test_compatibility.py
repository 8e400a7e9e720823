"""Pairs and triples of features, drawn: each trains as the plain run does, or the dry run refuses it in the
words of the table."""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.config import features as on
from fsdmoe.config import load_config
from fsdmoe.config.build import compose
from fsdmoe.config.compatibility import EXACT, check_compatibility
from fsdmoe.config.schema import Config
from fsdmoe.core.features import Feature
from fsdmoe.experts.config import EXPERT_PARALLELISM
from fsdmoe.fsdp.config import CPU_OFFLOAD, LEAN
from fsdmoe.mesh import build_meshes
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.optim.config import STATE_OFFLOAD
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import TINY, tiny_config

PLAIN: dict[str, Any] = {
    "train.steps": 2, "train.global_batch_size": 8, "train.micro_batch_size": 2, "train.eval_interval": -1,
    "model.num_hidden_layers": 2,
}  # fmt: skip
BASE = {
    "model.preset": "tiny-qwen3", "model.vocab_size": 264, "data.seq_len": 32,
    "precision.param_dtype": "float32",
}  # fmt: skip
"""Of a command line, as of the runs."""
SETTINGS: dict[Feature, dict[str, Any]] = {
    EXPERT_PARALLELISM: {"mesh.ep": 2},
    on.EXPERT_TENSOR_PARALLELISM: {"mesh.etp": 2},
    on.TENSOR_PARALLELISM: {"mesh.tp": 2},
    on.CONTEXT_PARALLELISM: {"mesh.cp": 2},
    on.EXCHANGED_HEADS: {"context_parallel.mode": "all_to_all", "mesh.cp": 2},
    on.REPLICAS: {"mesh.dp_outer": 2},
    on.CHUNKS: {"experts.chunks": 2, "mesh.ep": 2},
    on.SUB_BATCHES: {"experts.sub_batches": 2, "mesh.ep": 2},
    on.CLONES: {"experts.clones": 2, "experts.clone_rows": 0, "mesh.ep": 2},
    on.FLEX: {"experts.dispatcher": "flex", "mesh.ep": 2},
    on.SEQUENTIAL: {"experts.compute": "sequential"},
    on.RECORD: {"experts.record": "{folder}/routing"},
    on.RECOMPUTED_LAYERS: {"memory.recompute": '["layer"]'},
    on.RECOMPUTED_ATTENTION: {"memory.recompute": '["attention"]'},
    on.RECOMPUTED_EXPERTS: {"memory.recompute": '["experts", "router"]'},
    on.RESENT_ROWS: {"memory.recompute": '["dispatch"]', "mesh.ep": 2},
    on.ZERO_1: {"fsdp.shard": "optimizer"},
    on.ZERO_2: {"fsdp.shard": "grads"},
    on.KEPT_WEIGHTS: {"fsdp.reshard_after_forward": "false"},
    on.REDUCED_LAST: {"fsdp.reduce": "last"},
    on.WHOLE_ROWS: {"fsdp.granule": "rows"},
    LEAN: {"fsdp.lean": "true"},
    on.DEBUG: {"fsdp.debug": "true"},
    on.OFFLOAD: {"memory.offload": '["qkv"]'},
    STATE_OFFLOAD: {"optim.state_offload": 0.5},
    on.KEPT_ROWS: {"memory.keep": "rows"},
    # Planned or refused, not trained: they need a GPU to do anything, or change numbers.
    CPU_OFFLOAD: {"fsdp.cpu_offload": "true"},
    on.PLAIN_TORCH: {"train.kernels": "torch"},
    on.GRAPHS_OF_STEPS: {"train.graphs": "step", "precision.param_dtype": "bfloat16"},
    on.GRAPHS_OF_LAYERS: {"train.graphs": "layer"},
    on.DYNAMIC_CONTEXT: {"context_parallel.dynamic": "true"},
}
MOST_RANKS = 4
Draw = tuple[Feature, ...]


def draws(count: int, seed: int) -> list[Draw]:
    """Pairs and triples of features that can be switched on together, on so few ranks."""
    source = random.Random(seed)
    found: list[Draw] = []
    while len(found) < count:
        drawn = tuple(source.sample(list(SETTINGS), source.choice((2, 3))))
        if drawn not in found and settings_of(drawn) is not None and world_of(drawn) <= MOST_RANKS:
            found.append(drawn)
    return found


def settings_of(drawn: Draw) -> dict[str, Any] | None:
    """None where two of them want other values of one key."""
    merged: dict[str, Any] = {}
    for feature in drawn:
        for key, value in SETTINGS[feature].items():
            if merged.setdefault(key, value) != value:
                return None
    return merged


def world_of(drawn: Draw) -> int:
    axes = {key: value for key, value in (settings_of(drawn) or {}).items() if key.startswith("mesh.")}
    dense = axes.get("mesh.cp", 1) * axes.get("mesh.tp", 1)
    expert = axes.get("mesh.ep", 1) * axes.get("mesh.etp", 1)
    return int(axes.get("mesh.dp_outer", 1) * max(dense, expert))


def config_of(drawn: Draw, **changes: Any) -> Config:
    """Not checked across sections."""
    problems: list[str] = []
    chosen = {key: str(value) for key, value in (PLAIN | (settings_of(drawn) or {}) | changes).items()}
    config, _ = compose(copy.deepcopy(TINY), chosen, problems)
    assert not problems
    return config


def is_refused(drawn: Draw) -> bool:
    return bool(check_compatibility(config_of(drawn)))


def _train(folder: str, chosen: dict[str, Any]) -> None:
    keys = {key.replace(".", "__"): str(value).format(folder=folder) for key, value in chosen.items()}
    config = tiny_config(folder, dist.get_world_size(), **keys)
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))


def losses(drawn: Draw) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_train, world_of(drawn), folder, PLAIN | (settings_of(drawn) or {}))
        rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@functools.cache
def plain_losses() -> list[tuple[float, float]]:
    return losses(())


def check_trains_as_the_plain_run(drawn: Draw) -> None:
    found = losses(drawn)
    assert len(found) == 2
    for mine, plain in zip(found, plain_losses(), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5), " and ".join(feature.name for feature in drawn)


def check_dry_run(drawn: Draw, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses what the table refuses, in its words, and nothing else."""
    chosen = BASE | PLAIN | (settings_of(drawn) or {})
    options = [text for key, value in chosen.items() for text in (f"--{key}", str(value))]
    plan = ["--dry-run", "--files-elsewhere", "--world", str(world_of(drawn))]
    lines = [line for _, line in check_compatibility(config_of(drawn))]
    if not lines:
        load_config([*options, *plan])
        return
    with pytest.raises(SystemExit) as end:
        load_config([*options, *plan])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-len(lines) :]
    assert [line.strip().removeprefix("fsdmoe: ") for line in said] == lines


SAMPLE = draws(60, seed=0)
TRAINED = [
    drawn for drawn in SAMPLE if set(drawn) <= set(EXACT) and world_of(drawn) <= 2 and not is_refused(drawn)
][:8]


def test_a_drawn_pair_or_triple_is_planned_or_refused_in_the_tables_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = [drawn for drawn in SAMPLE if is_refused(drawn)]
    assert len(refused) >= 10
    assert len(SAMPLE) - len(refused) >= 10
    for drawn in SAMPLE:
        check_dry_run(drawn, capsys)


@pytest.mark.parametrize("number", range(len(TRAINED)))
def test_a_drawn_pair_or_triple_that_no_row_refuses_trains_as_the_plain_run(number: int) -> None:
    check_trains_as_the_plain_run(TRAINED[number])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 13))
def test_twenty_drawn_pairs_and_triples_train_as_the_plain_run_or_are_refused(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for drawn in draws(20, seed):
        check_dry_run(drawn, capsys)
        if set(drawn) <= set(EXACT) and not is_refused(drawn):
            check_trains_as_the_plain_run(drawn)


@pytest.mark.full
@pytest.mark.parametrize("first", range(len(EXACT) - 1))
def test_a_feature_that_changes_no_number_trains_with_every_other_one(
    first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in EXACT[first + 1 :]:
        drawn = (EXACT[first], other)
        if settings_of(drawn) is not None:
            check_dry_run(drawn, capsys)
            if not is_refused(drawn):
                check_trains_as_the_plain_run(drawn)


def test_every_exact_feature_is_drawn() -> None:
    assert set(EXACT) <= set(SETTINGS)
