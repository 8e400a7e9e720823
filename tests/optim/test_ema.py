"""Averaged weights against a loop in plain torch on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, EMAConfig, OptimConfig, WeightAverage
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_plain, run_sharded, shard_tiny
from tests.support.tiny_modules import reference

SETTINGS: dict[str, Any] = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.2}
DECAY = 0.7


def averages(average: WeightAverage) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in average.checkpoint_state()["tensors"].items()}


def follow(case: Case, steps: int, **keys: Any) -> tuple[float, float]:
    """On rank 0 the worst difference of the average, and how far the weights themselves are from it."""
    model = shard_tiny(case, build_meshes(**case.degrees))
    optimizer = AdamW(model, decays=lambda *_: True, **SETTINGS)
    average = WeightAverage(model, EMAConfig(decay=DECAY, **keys))
    plain = reference(**case.model)
    theirs = torch.optim.AdamW(plain.parameters(), **SETTINGS)
    wanted = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    every = keys.get("every", 1)
    for step in range(steps):
        run_sharded(model, case, step)
        optimizer.step()
        average.update()
        optimizer.zero_grad()
        if dist.get_rank() > 0:
            continue
        run_plain(plain, case, step)
        theirs.step()
        for name, parameter in plain.named_parameters():
            if (step + 1) % every == 0:
                wanted[name].lerp_(parameter.detach(), 1 - DECAY**every)
    found = averages(average)
    weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    worst = max(relative(whole, wanted[name]) for name, whole in found.items())
    return worst, max(relative(weights[name], whole) for name, whole in found.items())


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}), (3, {}), (4, {"dp_outer": 2, "ep": 2}), (4, {"tp": 2, "etp": 2}), (2, {"cp": 2}), (8, {"ep": 8})
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "degrees"), [LAYOUTS[1], *(pytest.param(*each, marks=pytest.mark.full) for each in LAYOUTS)]
)
def test_the_average_is_that_of_one_process(world: int, degrees: dict[str, int]) -> None:
    worst, apart = run_ranks(follow, world, Case(degrees=degrees), 3)[0]
    assert worst < 1e-5
    assert apart > 1e-3


def follow_seldom() -> tuple[float, float]:
    return follow(Case(), 5, every=2)


def test_an_update_every_other_step_leaves_the_power_of_the_decay() -> None:
    assert run_ranks(follow_seldom, 1)[0][0] < 1e-5


def follow_rounded(degrees: dict[str, int]) -> dict[str, list[float]]:
    """Weights that do not change: every bit is the average's own."""
    model = shard_tiny(Case(model={"num_layers": 1}), build_meshes(**degrees))
    average = WeightAverage(model, EMAConfig(decay=0.9, dtype="bfloat16"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for _ in range(40):
        average.update()
    found = averages(average)
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.bfloat16
        assert relative(found[name].float(), parameter.full_tensor()) < 0.05, name
    return {name: whole.flatten().tolist() for name, whole in found.items()}


def test_in_bfloat16_it_reaches_the_weights_with_the_same_bits_on_any_layout() -> None:
    assert run_ranks(follow_rounded, 3, {})[0] == run_ranks(follow_rounded, 1, {})[0]


def save(degrees: dict[str, int], folder: str) -> dict[str, list[float]]:
    case = Case(degrees=degrees)
    model = shard_tiny(case, build_meshes(**degrees))
    optimizer, average = AdamW(model, **SETTINGS), WeightAverage(model, EMAConfig(decay=DECAY))
    for step in range(2):
        run_sharded(model, case, step)
        optimizer.step()
        average.update()
        optimizer.zero_grad()
    checkpoint.save(folder, model, optimizer, ema=average)
    return {name: whole.flatten().tolist() for name, whole in averages(average).items()}


def load(degrees: dict[str, int], folder: str) -> dict[str, list[float]]:
    model = shard_tiny(Case(), build_meshes(**degrees))
    average = WeightAverage(model, EMAConfig(decay=DECAY))
    checkpoint.load(folder, model, AdamW(model, **SETTINGS), ema=average)
    assert average.is_loaded
    average.follow_load()
    assert average.checkpoint_state()["steps"] == 2
    return {name: whole.flatten().tolist() for name, whole in averages(average).items()}


@pytest.mark.parametrize(
    "layouts",
    [
        (LAYOUTS[1], (2, {"tp": 2, "etp": 2})),
        *(pytest.param((one, other), marks=pytest.mark.full) for one in LAYOUTS for other in LAYOUTS),
    ],
)
def test_a_resharded_resume_has_the_bits_that_were_saved(layouts: Any, tmp_path: Path) -> None:
    (world, degrees), (other, mesh) = layouts
    saved = run_ranks(save, world, degrees, str(tmp_path / "c"))[0]
    assert run_ranks(load, other, mesh, str(tmp_path / "c"))[0] == saved


def take_up(folder: str) -> bool:
    """A checkpoint without an average."""
    model = shard_tiny(Case(), build_meshes())
    optimizer = AdamW(model, **SETTINGS)
    checkpoint.save(folder, model, optimizer)
    average = WeightAverage(model, EMAConfig(decay=DECAY))
    checkpoint.load(folder, model, optimizer, ema=average)
    return average.is_loaded


def test_a_checkpoint_without_an_average_is_taken_up(tmp_path: Path) -> None:
    assert not run_ranks(take_up, 1, str(tmp_path / "c"))[0]


def lend() -> tuple[bool, bool]:
    case = Case()
    model = shard_tiny(case, build_meshes())
    optimizer, average = AdamW(model, **SETTINGS), WeightAverage(model, EMAConfig(decay=DECAY))
    run_sharded(model, case, 0)
    optimizer.step()
    average.update()
    optimizer.zero_grad()
    own = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    before, _ = run_sharded(model, case, 1)
    optimizer.zero_grad()
    with average.applied():
        lent = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        inside, _ = run_sharded(model, case, 1)
        optimizer.zero_grad()
    after, _ = run_sharded(model, case, 1)
    back = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    wanted = averages(average)
    is_lent = all(torch.equal(lent[name], wanted[name]) for name in wanted) and inside != before
    return is_lent, all(torch.equal(back[name], own[name]) for name in own) and after == before


def test_the_average_is_lent_to_the_model_and_the_weights_come_back() -> None:
    assert run_ranks(lend, 2)[0] == (True, True)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"decay": 1.0}, "optim.ema.decay: expected a number 0 to below 1"),
        ({"decay": 0.9, "every": 0}, "optim.ema.every"),
        ({"decay": 0.9, "dtype": "float16"}, "optim.ema.dtype"),
        ({"memory": "host"}, "expected optim.ema.decay above 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OptimConfig(ema=EMAConfig(**keys))
