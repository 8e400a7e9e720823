"""Accelerate's own loop trains a sharded model as it trains an unsharded one under data parallelism."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import RankFailure, requires_transformers, run_ranks
from tests.support.trainer_case import Rows, forget_accelerate, made_model, weights_of

pytestmark = [
    requires_transformers,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="pip install accelerate"),
]

SAVED, KILLED = 4, 5
"""Micro-batches after which the state is saved, and the run killed."""
Found = tuple[list[float], list[float], dict[str, torch.Tensor]]


def accelerated(sharded: bool, **settings: Any) -> Any:
    from accelerate import Accelerator

    forget_accelerate()
    accelerator = Accelerator(cpu=True, **settings)
    return fsdmoe.prepare_accelerator(accelerator) if sharded else accelerator


def run(folder: str, sharded: bool, sgd: bool = False, kill: bool = False, resume: bool = False) -> Found:
    """The loop of Accelerate's guide; losses, gradient norms and weights in the end."""
    accelerator = accelerated(sharded, gradient_accumulation_steps=2)
    model: Any = made_model(sharded)
    kind: Any = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    loader: Any = DataLoader(Rows(22), batch_size=2)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses, norms = [], []
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, SAVED)
    for number, given in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**given).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
        if not resume and number + 1 == SAVED:
            accelerator.save_state(folder)
        if kill and number + 1 == KILLED:
            dist.barrier()
            os._exit(9)
    return losses, norms, weights_of(accelerator.unwrap_model(model))


def compare(got: Found, wanted: Found) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert got[1] == pytest.approx(wanted[1], rel=1e-5)
    for name, value in wanted[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_accumulation_and_clipping_are_those_of_data_parallelism(tmp_path: Path) -> None:
    got = run_ranks(run, 2, str(tmp_path / "a"), True)[0]
    wanted = run_ranks(run, 2, str(tmp_path / "b"), False)[0]
    assert len(wanted[0]) == 6
    assert len(wanted[1]) == 3
    assert max(wanted[1]) > 0.5  # it was clipped
    compare(got, wanted)


@pytest.mark.full
def test_plain_sgd_takes_the_same_steps(tmp_path: Path) -> None:
    found = [run_ranks(run, 2, str(tmp_path / str(sharded)), sharded, True)[0] for sharded in (True, False)]
    compare(*found)


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    ranks = 2
    whole = run_ranks(run, ranks, str(tmp_path / "whole"), True)[0]
    with pytest.raises(RankFailure):
        run_ranks(run, ranks, str(tmp_path / "killed"), True, False, True, fresh=True)
    losses, norms, weights = run_ranks(run, ranks, str(tmp_path / "killed"), True, False, False, True)[0]
    compare((losses, norms, weights), (whole[0][SAVED:], whole[1][SAVED // 2 :], whole[2]))
    assert losses


def save_weights(folder: str) -> dict[str, torch.Tensor]:
    accelerator = accelerated(True)
    model = accelerator.prepare(made_model(True))
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    return weights_of(model)


@pytest.mark.full
def test_save_model_writes_whole_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = run_ranks(save_weights, 2, str(tmp_path))[0]
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def refused(settings: dict[str, Any]) -> str:
    model = made_model(True)
    with pytest.raises(ConfigError) as caught:
        accelerated(True, **settings).prepare(model)
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "key"),
    [({"mixed_precision": "bf16"}, "mixed_precision"), ({"dynamo_backend": "eager"}, "torch_compile")],
)
def test_what_sharding_does_otherwise_is_refused(settings: dict[str, Any], key: str) -> None:
    assert run_ranks(refused, 2, settings)[0].startswith(key)
