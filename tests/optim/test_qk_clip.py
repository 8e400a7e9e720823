"""QK-clip: which logits are found, what is scaled, and that training with too high a rate stays finite."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models.config import preset_config
from fsdmoe.models.decoder import Decoder, build_model
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.optim import GroupConfig, Muon, MuonConfig, QKClip, freeze
from fsdmoe.optim.qk_clip import largest_logits
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import ComputeDtype, PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.behaviour.test_compatibility import PLAIN, _train

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 3, 3]])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_largest_logit_is_that_of_what_queries_see(
    window: int | None, documents: torch.Tensor | None
) -> None:
    query, key = torch.randn(2, 8, 4, 5), torch.randn(2, 8, 2, 5)
    context = SimpleNamespace(split=None, document_ids_BS=documents)
    found = largest_logits(query, key, context, 0.5, window, rows=8)
    for head in range(4):
        seen = [
            0.5 * float(query[row, i, head] @ key[row, j, head // 2])
            for row in range(2)
            for i in range(8)
            for j in range(i + 1)
            if (window is None or i - j < window)
            and (documents is None or documents[row, i] == documents[row, j])
        ]
        assert found[head].item() == pytest.approx(max(seen), rel=1e-5)


def test_a_sample_is_evenly_spaced_and_has_the_last_query() -> None:
    query = torch.zeros(1, 9, 1, 1)
    query[0, :, 0, 0] = torch.arange(9.0)
    context = SimpleNamespace(split=None, document_ids_BS=None)
    found = [
        float(largest_logits(query * sign, query.new_ones(1, 9, 1, 1), context, 1.0, None, 3))
        for sign in (1, -1)
    ]
    assert found == [8.0, -2.0]  # of queries 8, 5 and 2


def sharded(
    preset: str, degrees: dict[str, int], factor: float = 20.0, dtype: ComputeDtype = "float32"
) -> Decoder:
    """One layer, with large logits that differ between heads."""
    config = preset_config(preset, num_hidden_layers=1)
    meshes = build_meshes(**degrees)
    policy = ParallelPolicy(
        precision=PrecisionConfig(param_dtype=dtype), grad_divisor=float(dist.get_world_size())
    )
    model = parallelize(build_model(config), meshes, policy)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
                parameter.mul_(factor)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(2.0)
    return model


def tokens_of(model: Decoder) -> torch.Tensor:
    drawn = torch.randint(model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(1))
    return drawn.to(engine_of(model).meshes.device)


def logits_of(model: Decoder, clip: QKClip) -> list[float]:
    tokens_BS = tokens_of(model)
    model(tokens_BS, labels_BS=tokens_BS).loss.backward()
    engine_of(model).zero_grad()
    found_H = clip._layers[0].clone()
    dist.all_reduce(found_H, dist.ReduceOp.MAX)  # a rank of tp has its own heads
    return found_H.tolist()


def clipped(preset: str, degrees: dict[str, int]) -> tuple[list[float], list[float]]:
    """Logits by head before and after, of the same rows and without another update."""
    model = sharded(preset, degrees)
    clip = QKClip(model, 6.0, rows=99)
    before = logits_of(model, clip)
    clip.step()
    assert clip.largest()[0] == pytest.approx(max(before))
    return before, logits_of(model, clip)


PRESETS = ["tiny-mixtral", "tiny-qwen3", "tiny-deepseek-v3", "tiny-gpt-oss"]


def check_heads(preset: str, before: list[float], after: list[float]) -> None:
    heads_together = {"tiny-mixtral": 2, "tiny-gpt-oss": 2, "tiny-qwen3": 4, "tiny-deepseek-v3": 1}[preset]
    assert max(before) > 7
    for start in range(0, len(before), heads_together):
        part = slice(start, start + heads_together)
        factor = min(1.0, 6.0 / max(before[part]))
        assert after[part] == pytest.approx([factor * each for each in before[part]], rel=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_logits_of_the_same_rows_come_down_to_the_threshold(preset: str) -> None:
    check_heads(preset, *run_ranks(clipped, 1, preset, {})[0])


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (3, {}), (2, {"tp": 2}), (2, {"dp_outer": 2}), (4, {"tp": 2, "ep": 2, "etp": 2})
]  # fmt: skip


def check_layout(preset: str, world: int, degrees: dict[str, int]) -> None:
    alone, spread = run_ranks(clipped, 1, preset, {})[0], run_ranks(clipped, world, preset, degrees)[0]
    for mine_H, other_H in zip(spread, alone, strict=True):
        assert mine_H == pytest.approx(other_H, rel=1e-4)


def test_a_head_that_lies_on_two_ranks_is_scaled_alike_on_both() -> None:
    check_layout("tiny-gpt-oss", *LAYOUTS[0])


@pytest.mark.full
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("world", "degrees"), LAYOUTS)
def test_every_layout_scales_alike(preset: str, world: int, degrees: dict[str, int]) -> None:
    check_layout(preset, world, degrees)


def explode(
    threshold: float, steps: int = 40, dtype: ComputeDtype = "float32"
) -> tuple[list[float], list[float]]:
    """Losses, and largest logits, of steps with far too high a rate: on the same tokens, whose labels change
    so that there is always something to learn."""
    model = sharded("tiny-mixtral", {}, factor=5.0, dtype=dtype)
    optimizer = Muon(model, lr=0.1, weight_decay=0.0, muon=MuonConfig(ns_dtype="float32"))
    clip = QKClip(model, threshold, rows=99)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    tokens_BS = tokens_of(model)
    losses, logits = [], []
    for step in range(steps):
        labels_BS = tokens_BS.roll(step // 8 + 1, 1)
        loss = model(tokens_BS[rows], labels_BS=labels_BS[rows]).loss
        loss.backward()
        optimizer.step()
        clip.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        logits += clip.largest()
    return losses, logits


def test_logits_stay_at_the_threshold_where_plain_muon_lets_them_grow() -> None:
    free, held = run_ranks(explode, 1, 1e30)[0], run_ranks(explode, 1, 30.0)[0]
    assert max(free[1]) > 3 * 30
    assert max(held[1]) < 1.25 * 30  # one update carries them past it by its own growth, no more
    assert torch.isfinite(torch.tensor(held[0])).all()


def test_clipped_heads_train_as_on_one_process() -> None:
    alone, spread = (run_ranks(explode, world, 4.0, 12)[0] for world in (1, 2))
    assert max(alone[1][6:]) > 4.0  # rates this high double a difference every other step: not many steps
    assert spread[0] == pytest.approx(alone[0], rel=1e-4)
    assert spread[1] == pytest.approx(alone[1], rel=1e-4)


def test_a_run_logs_the_largest_logit_of_each_layer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_train, 1, folder, PLAIN | {"optim.qk_clip": 0.05})
        rows = [row for row in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in row]
    assert [list(row["attention_logits"]) for row in rows] == [["layer 0", "layer 1"]] * 2


def refuse_frozen() -> str:
    model = build_model(preset_config("tiny-mixtral", num_hidden_layers=1))
    freeze(model, [GroupConfig(params=("*q_proj*",), frozen=True)])
    model = parallelize(model, build_meshes(), ParallelPolicy())
    with pytest.raises(ConfigError) as caught:
        QKClip(model, 1.0)
    return str(caught.value)


def test_frozen_projections_are_refused_by_name() -> None:
    assert "expected q_proj to be trained" in run_ranks(refuse_frozen, 1)[0]
