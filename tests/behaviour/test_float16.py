"""Runs in float16: their gradients survive any batch size, an overflow costs one step, the scale resumes."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.fsdp import engine_of
from fsdmoe.graphs import MicroBatches
from fsdmoe.mesh import build_meshes
from fsdmoe.models.decoder import StepCounts
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

MANY_TOKENS = 4 << 20
Weights = dict[str, torch.Tensor]


def build_run(folder: str, dtype: str, **overrides: Any) -> Run:
    settings = {"train__eval_interval": -1, "train__micro_batch_size": 2, "precision__param_dtype": dtype}
    config = tiny_config(folder, dist.get_world_size(), **{**settings, **overrides})
    return Run(config, build_meshes(config.mesh))


def weights_of(run: Run) -> Weights:
    return {name: p.full_tensor().detach().clone() for name, p in run.model.named_parameters()}


def gradients_of_many_tokens(folder: str, dtype: str) -> Weights:
    """What the optimizer reads in a step whose loss is a mean over four million tokens; only a few of them
    are computed, the others stand for ranks that are not here."""
    has_scale = hasattr(PrecisionConfig, "build_scaler")  # which starts from the configured number of tokens
    run = build_run(folder, dtype, **({"precision__loss_scale__initial": MANY_TOKENS} if has_scale else {}))
    counts = StepCounts(torch.tensor(float(MANY_TOKENS)), torch.tensor(float(MANY_TOKENS)))
    run.feed.count = lambda model, inputs: counts  # type: ignore[method-assign]
    found: Weights = {}

    def step() -> None:
        found.update((name, p.grad.full_tensor().clone()) for name, p in run.model.named_parameters())

    run.optimizer.step = step  # type: ignore[method-assign, assignment]
    run.train_step()
    return found


def test_the_gradient_of_a_mean_over_four_million_tokens_is_there(tmp_path: Path) -> None:
    wanted = run_ranks(gradients_of_many_tokens, 1, str(tmp_path / "wide"), "float32")[0]
    found = run_ranks(gradients_of_many_tokens, 1, str(tmp_path / "half"), "float16")[0]
    lost = [name for name, gradient in found.items() if not gradient.any() and wanted[name].any()]
    assert not lost, f"{len(lost)} of {len(found)} gradients are exactly zero, {lost[0]} among them"
    for name, gradient in found.items():
        difference = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert difference < 0.05, f"{name}: {difference:.3f}"


class Overflowing:
    """A decoder whose loss is infinite on one rank, when it is told so; the loss that is reported is not."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.armed = decoder, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.decoder(*args, **kwargs)
        if self.armed and dist.get_rank() == dist.get_world_size() - 1:
            out = dataclasses.replace(out, loss=out.loss * math.inf)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


def overflowing(run: Any) -> Overflowing:
    """The run's decoder, by way of which all its micro-batches go from now on."""
    run.decoder = Overflowing(run.decoder)
    run.micro_batches = MicroBatches(run.decoder, engine_of(run.model), run.scaler)
    return run.decoder


def overflow_once(folder: str, degrees: dict[str, int]) -> dict[str, Any]:
    settings = {f"mesh__{key}": size for key, size in degrees.items()} | {"train__steps": 3}
    run = build_run(folder, "float16", experts__balance__bias_rate=0.01, **settings)
    decoder = overflowing(run)
    biases = [router.e_score_correction_bias for router in decoder.routers()]
    counters = [state["step"] for state in run.optimizer.checkpoint_state()["state"].values()]

    def copies() -> list[torch.Tensor]:
        return [t.clone() for t in (*weights_of(run).values(), *biases, *counters)]

    def is_unchanged(before: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(before, copies(), strict=True))

    scales, skipped, same = [run.scaler.value], [], []
    for step in range(3):
        decoder.armed = step == 1
        before = copies()
        record = run.train_step()
        run.observer.log_step(record)
        scales.append(run.scaler.value)
        skipped.append(record.skipped)
        same.append(is_unchanged(before))
        assert math.isfinite(record.loss)
    run.close("finished")
    counted = {counter.item() for counter in counters}
    return {**run.progress, "scales": scales, "skipped": skipped, "unchanged": same, "counted": counted}


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(4, {"dp_outer": 2, "ep": 2}), pytest.param(2, {"ep": 2}, marks=pytest.mark.full)],
)
def test_an_overflow_on_one_rank_halves_the_scale_and_skips_one_step_on_all(
    world: int, degrees: dict[str, int], tmp_path: Path
) -> None:
    for found in run_ranks(overflow_once, world, str(tmp_path), degrees):
        assert found["scales"] == [256, 256, 128, 128]
        assert found["skipped"] == [0, 1, 1]
        assert found["unchanged"] == [False, True, False]  # weights, routing biases, AdamW's step counts
        assert found["counted"] == {2.0}
        assert (found["step"], found["skipped_in_a_row"]) == (3, 0)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss_scale"], row["skipped"]) for row in rows] == [(256, 0), (128, 1), (128, 1)]
    assert rows[1]["grad_norm"] is None
    summary = (tmp_path / "summary.txt").read_text()
    assert "loss scale      128" in summary
    assert "skipped steps   1" in summary


def train_and_save(folder: str, degrees: dict[str, int], steps: int) -> list[tuple[float, int, int]]:
    """The scale, its steps since it moved, and steps skipped, at the start and after each step."""
    settings = {f"mesh__{key}": size for key, size in degrees.items()} | {"checkpoint__load": "latest"}
    settings |= {"checkpoint__interval": 3, "checkpoint__asynchronous": False, "train__steps": 9}
    settings |= {"precision__loss_scale__growth_interval": 2, "precision__loss_scale__initial": 64}
    run = build_run(folder, "float16", **settings)
    decoder = overflowing(run)
    seen = [tuple(run.scaler.state_dict().values())]
    for _ in range(steps):
        decoder.armed = run.progress["step"] == 2
        run.train_step()
        run.checkpoints.maybe_save(run.progress["step"], run.state)
        seen.append(tuple(run.scaler.state_dict().values()))
    run.close("finished")
    return seen


def test_the_scale_resumes_under_another_layout(tmp_path: Path) -> None:
    first = run_ranks(train_and_save, 2, str(tmp_path), {"ep": 2}, 3)
    assert first[0] == [(64, 0, 0), (64, 1, 0), (128, 0, 0), (64, 0, 1)]
    for seen in run_ranks(train_and_save, 4, str(tmp_path), {"dp_outer": 2, "ep": 2}, 3):
        assert seen == [(64, 0, 1), (64, 1, 1), (128, 0, 1), (128, 1, 1)]
    for seen in run_ranks(train_and_save, 1, str(tmp_path), {}, 0):
        assert seen == [(128, 1, 1)]
