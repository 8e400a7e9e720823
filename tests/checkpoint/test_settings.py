"""Resuming with other settings of the optimizer uses them; the moments and the learning rate go on."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, LoadPolicy
from fsdmoe.fsdp import FSDPPolicy, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

OLD: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
NEW: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.4}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def build(made: nn.Module, settings: dict[str, Any]) -> torch.optim.AdamW:
    decayed = [p for p in made.parameters() if p.dim() >= 2]
    kept = [p for p in made.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, **settings)


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        made(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in made.parameters()]


def set_to(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
    """Change them by hand; what is not decayed stays so."""
    for group in optimizer.param_groups:
        group.update({k: v for k, v in settings.items() if k != "weight_decay" or group[k]})


def used(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [(g["betas"], g["eps"], g["weight_decay"], g["lr"]) for g in optimizer.param_groups]


@pytest.mark.parametrize("through", ["load", "checkpointer"])
def test_a_torch_optimizer_resumes_with_what_it_was_built_with(
    tmp_path: Path, through: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = model()
    optimizer = build(one, OLD)
    train(one, optimizer, range(3))
    for group in optimizer.param_groups:
        group["lr"] = 5e-3  # as a schedule does; it goes on from there
    one_run = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path)
    one_run.save(3, {"model": one, "optimizer": optimizer})
    set_to(optimizer, NEW)
    wanted = train(one, optimizer, range(3, 6))

    other = model()
    resumed = build(other, NEW)
    with caplog.at_level(logging.WARNING):
        if through == "load":
            checkpoint.load(tmp_path, other, resumed)
        else:
            Checkpointer(CheckpointConfig(asynchronous=False), tmp_path).load(
                {"model": other, "optimizer": resumed}
            )
    assert used(resumed) == [((0.8, 0.9), 1e-3, 0.4, 5e-3), ((0.8, 0.9), 1e-3, 0.0, 5e-3)]
    for got, want in zip(train(other, resumed, range(3, 6)), wanted, strict=True):
        assert torch.equal(got, want)
    assert "weight_decay 0.1 there, 0.4 here" in caplog.text
    assert "betas (0.9, 0.95) there, (0.8, 0.9) here" in caplog.text
    assert "eps 1e-08 there, 0.001 here" in caplog.text
    assert "those of this run are used" in caplog.text


def test_the_stored_settings_are_used_on_request_and_that_is_said_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = model()
    checkpoint.save(tmp_path / "ckpt", one, build(one, OLD))
    other = model()
    resumed = build(other, NEW)
    checkpoint.load(tmp_path / "ckpt", other, resumed, policy=LoadPolicy(optimizer_settings="stored"))
    assert used(resumed) == [((0.9, 0.95), 1e-8, 0.1, 1e-2), ((0.9, 0.95), 1e-8, 0.0, 1e-2)]
    assert "the checkpoint's are used" in caplog.text


def test_nothing_is_said_where_nothing_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = model()
    checkpoint.save(tmp_path / "ckpt", one, build(one, OLD))
    other = model()
    checkpoint.load(tmp_path / "ckpt", other, build(other, OLD))
    assert not [r for r in caplog.records if "settings" in r.message]


def test_state_that_an_optimizer_keeps_in_its_groups_comes_back(tmp_path: Path) -> None:
    one = model()
    optimizer = build(one, OLD)
    optimizer.param_groups[0]["k"] = 17
    checkpoint.save(tmp_path / "ckpt", one, optimizer)
    other = model()
    resumed = build(other, NEW)
    resumed.param_groups[0]["k"] = 0
    checkpoint.load(tmp_path / "ckpt", other, resumed)
    assert resumed.param_groups[0]["k"] == 17


def test_groups_are_known_by_their_members_in_any_order(tmp_path: Path) -> None:
    one, other = model(), model()
    rates = {1: 1e-5, 2: 1e-3}

    def grouped(built: torch.nn.Module, dims: tuple[int, int], lr: float | None = None) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [
                {"params": [p for p in built.parameters() if min(p.dim(), 2) == dim], "lr": lr or rates[dim]}
                for dim in dims
            ]
        )

    checkpoint.save(tmp_path / "ckpt", one, grouped(one, (2, 1)))
    resumed = grouped(other, (1, 2), lr=0.5)
    checkpoint.load(tmp_path / "ckpt", other, resumed)
    assert [group["lr"] for group in resumed.param_groups] == [1e-5, 1e-3]
    assert all("members" not in group for group in resumed.param_groups)


def rates_after_a_load(folder: str, groups: tuple[tuple[str, ...], ...]) -> list[float]:
    """Of ``AdamW``, given as torch takes them, after a load of two groups with a rate each."""
    policy = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32"))

    def built(members: tuple[tuple[str, ...], ...], rates: tuple[float, ...]) -> tuple[nn.Module, AdamW]:
        sharded = fully_shard(model(), build_meshes(), policy)
        named = dict(sharded.named_parameters())
        chosen = [[named[name] for name in part] for part in members]
        given = [{"params": part, "lr": lr} for part, lr in zip(chosen, rates, strict=True)]
        return sharded, AdamW(given)

    checkpoint.save(f"{folder}/ckpt", *built((WEIGHTS, BIASES), (1e-3, 1e-5)))
    other, resumed = built(groups, (0.5,) * len(groups))
    checkpoint.load(f"{folder}/ckpt", other, resumed)
    return [group["lr"] for group in resumed.param_groups]


WEIGHTS, BIASES = ("0.weight", "2.weight"), ("0.bias", "2.bias")


@pytest.mark.parametrize(
    ("groups", "rates"),
    [
        ((BIASES, WEIGHTS), [1e-5, 1e-3]),
        ((*((name,) for name in WEIGHTS), BIASES), [1e-3, 1e-3, 1e-5]),
    ],
)
def test_groups_of_ours_without_names_are_known_by_their_members(
    tmp_path: Path, groups: tuple[tuple[str, ...], ...], rates: list[float]
) -> None:
    assert run_ranks(rates_after_a_load, 1, str(tmp_path), groups)[0] == rates


def resume_ours(folder: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], bool]:
    """fsdmoe's AdamW: its settings after a load, after torch's load_state_dict, and whether it goes on as one
    whose settings were changed by hand."""
    meshes = build_meshes()
    policy = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"))
    one, other, third = (fully_shard(model(), meshes, policy) for _ in range(3))
    optimizer = AdamW(one, lr=1e-2, **OLD)
    train(one, optimizer, range(3))
    checkpoint.save(f"{folder}/ckpt", one, optimizer)
    state = optimizer.state_dict()
    by_torch = AdamW(third, lr=1e-2, **NEW)
    by_torch.load_state_dict(state)
    set_to(optimizer, NEW)
    resumed = AdamW(other, lr=1e-2, **NEW)
    checkpoint.load(f"{folder}/ckpt", other, resumed)
    settings = used(resumed)
    ours, wanted = (
        [p.full_tensor() for p in train(*pair, range(3, 6))]  # type: ignore[attr-defined]
        for pair in ((other, resumed), (one, optimizer))
    )
    is_same = all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    return settings, used(by_torch), is_same


def test_our_optimizer_resumes_with_what_it_was_built_with(tmp_path: Path) -> None:
    for settings, by_torch, is_same in run_ranks(resume_ours, 2, str(tmp_path)):
        assert settings == [((0.8, 0.9), 1e-3, 0.4, 1e-2), ((0.8, 0.9), 1e-3, 0.0, 1e-2)]
        assert by_torch == [((0.9, 0.95), 1e-8, 0.1, 1e-2), ((0.9, 0.95), 1e-8, 0.0, 1e-2)], (
            "load_state_dict keeps torch's rule: the saved settings win"
        )
        assert is_same


def exchange_groups(folder: str) -> list[dict[int, float]]:
    """Learning rates by the number of a group's parameters: of the saved optimizer, of one with its groups in
    another order, and of one group."""
    meshes, rates = build_meshes(), []
    policy = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"))
    for number in range(3):
        wrapped = fully_shard(model(), meshes, policy)
        first, *others = wrapped.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-2}, {"params": others, "lr": 4e-2}]
        if number:
            groups = groups[::-1] if number == 1 else [{"params": [first, *others]}]
            groups = [group | {"lr": 1.0} for group in groups]
        optimizer = AdamW(groups)
        if number:
            checkpoint.load(f"{folder}/ckpt", wrapped, optimizer)
        else:
            checkpoint.save(f"{folder}/ckpt", wrapped, optimizer)
        rates.append({len(group["params"]): group["lr"] for group in optimizer.param_groups})
    return rates


def test_groups_without_names_are_known_by_their_members(tmp_path: Path) -> None:
    for saved, exchanged, together in run_ranks(exchange_groups, 2, str(tmp_path)):
        assert exchanged == saved
        assert len(saved) == 2
        assert list(together.values()) == [4e-2], "that of most"


def run_train(folder: str, load: str, optim: dict[str, Any]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Two steps of train.py's run with these settings; what its optimizer used, and what was logged."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("fsdmoe.checkpoint").addHandler(handler := Keep(level=logging.INFO))
    logging.getLogger("fsdmoe.checkpoint").setLevel(logging.INFO)
    overrides = {f"optim__{key}": value for key, value in optim.items()}
    overrides |= {"checkpoint__interval": 2, "checkpoint__load": load, "train__eval_interval": -1}
    config = tiny_config(folder, 1, **overrides, data__max_bytes=50_000)
    run = Run(config, build_meshes(config.mesh))
    for _ in range(2):
        run.train_step()
    run.checkpoints.maybe_save(run.progress["step"], run.state)
    run.checkpoints.close()
    run.close("done")
    logging.getLogger("fsdmoe.checkpoint").removeHandler(handler)
    return used(run.optimizer), lines


def test_train_py_resumes_with_the_configurations_settings(tmp_path: Path) -> None:
    run_ranks(run_train, 1, str(tmp_path), "none", {"weight_decay": 0.1, "eps": 1e-8})
    changed = {"weight_decay": 0.4, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}
    ((settings, lines),) = run_ranks(run_train, 1, str(tmp_path), "latest", changed)
    assert [group[:3] for group in settings] == [((0.8, 0.9), 1e-3, 0.4), ((0.8, 0.9), 1e-3, 0.0)]
    assert "changed since it was saved: optim.weight_decay 0.1 -> 0.4" in lines
