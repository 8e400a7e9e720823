"""Parameter groups by patterns and as torch has them, against torch's optimizers on the plain model."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.config import Config
from fsdmoe.config.build import build_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPPolicy, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, GroupConfig, OptimConfig, build_optimizer, freeze, group_lines, learning_rate
from fsdmoe.optim.schedule import set_learning_rates
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_plain, run_sharded, shard_tiny
from tests.support.tiny_modules import reference

GROUPS = (
    GroupConfig(name="experts", params=("*.moe.gate_up", "*.moe.down"), lr=2e-3, betas=(0.8, 0.9)),
    GroupConfig(params=("embed.*",), lr_scale=0.5, weight_decay=0.0),
    GroupConfig(name="norms", params=("*norm*",), weight_decay=0.3, eps=1e-5),
)
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6}


def torch_groups(model: nn.Module) -> list[dict[str, Any]]:
    """What ``GROUPS`` say, written by hand."""
    made: dict[str, dict[str, Any]] = {
        "experts": {"lr": 2e-3, "betas": (0.8, 0.9), "weight_decay": 0.2},
        "embed": {"lr": 1.5e-3, "weight_decay": 0.0},
        "norms": {"weight_decay": 0.3, "eps": 1e-5},
        "matrices": {"weight_decay": 0.2},
        "vectors": {"weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        kind = "matrices" if parameter.dim() >= 2 else "vectors"
        if name.endswith(("moe.gate_up", "moe.down")):
            kind = "experts"
        elif name.startswith("embed"):
            kind = "embed"
        elif "norm" in name:
            kind = "norms"
        made[kind].setdefault("params", []).append(parameter)
    return [group for group in made.values() if "params" in group]


def follow_torch(case: Case, kind: str, steps: int) -> float:
    """The worst difference of weights between ours on shards and torch's on the plain model, on rank 0."""
    model = shard_tiny(case, build_meshes(**case.degrees))
    plain = reference(**case.model)
    theirs: torch.optim.Optimizer
    if kind == "sgd":
        config = OptimConfig(name="sgd", lr=0.05, groups=(GroupConfig(params=("*.moe.*",), lr=0.2),))
        ours = build_optimizer(model, config)
        experts = [p for name, p in plain.named_parameters() if ".moe." in name]
        rest = [p for name, p in plain.named_parameters() if ".moe." not in name]
        theirs = torch.optim.SGD([{"params": experts, "lr": 0.2}, {"params": rest}], lr=0.05)
    else:
        theirs = torch.optim.AdamW(torch_groups(plain), **SETTINGS)
        if kind == "patterns":
            ours = AdamW(model, weight_decay=0.2, groups=GROUPS, **SETTINGS)
        else:
            ours = AdamW(torch_groups(model), **SETTINGS)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 2 * steps) for each in (ours, theirs)]
    for step in range(steps):
        run_sharded(model, case, step)
        if dist.get_rank() == 0:
            run_plain(plain, case, step)
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        ours.zero_grad()
    targets = dict(plain.named_parameters())
    wholes = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return max(relative(whole, targets[name].detach()) for name, whole in wholes.items())


@pytest.mark.parametrize(
    ("world", "degrees", "kind"),
    [
        (2, {}, "dicts"),
        (2, {"ep": 2}, "patterns"),
        (2, {"ep": 2}, "sgd"),
        pytest.param(4, {"ep": 2}, "patterns", marks=pytest.mark.full),
    ],
)
def test_groups_follow_torch_with_the_same_groups_and_schedulers(
    world: int, degrees: dict[str, int], kind: str
) -> None:
    assert run_ranks(follow_torch, world, Case(degrees=degrees), kind, 4)[0] < 1e-3


def frozen_run() -> tuple[bool, bool, dict[str, str], int]:
    model, groups = reference(), (GroupConfig(params=("layers.0.*",), frozen=True), GROUPS[1])
    freeze(model, groups)
    fully_shard(model, build_meshes(), FSDPPolicy(grad_divisor=1.0))
    optimizer = AdamW(model, groups=groups)
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    run_sharded(model, Case(), 0)
    optimizer.step()
    same = {name: torch.equal(before[name], p.full_tensor()) for name, p in model.named_parameters()}
    first = all(is_same for name, is_same in same.items() if name.startswith("layers.0."))
    lines = group_lines(model, optimizer, groups)
    return first, same["head.weight"], lines, len(optimizer.checkpoint_state()["state"])


def test_frozen_groups_keep_their_weights_and_the_table_counts_them() -> None:
    first, head, lines, num_states = run_ranks(frozen_run, 1)[0]
    assert first
    assert not head
    assert "frozen" in lines
    assert (
        lines["group embed.*"]
        == "1 tensors, 640 parameters, lr 0.0005, weight decay 0, betas 0.9 0.999, eps 1e-08"
    )
    assert num_states == len([n for n, _ in reference().named_parameters() if not n.startswith("layers.0.")])


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "matches nothing": ([{"params": ["layers.*.mpl.*"], "lr": 1.0}], "groups[0].params: expected names"),
    "matches twice": (
        [{"params": ["layers.0.*"], "lr": 1.0}, {"params": ["*.moe.down"], "lr": 2.0}],
        "groups[1].params: expected parameters of no other group, got layers.0.moe.down",
    ),
    "frozen by two": (
        [{"params": ["layers.0.*"], "frozen": True}, {"params": ["*.moe.*"], "frozen": True}],
        "which is frozen by both 'layers.0.*' and '*.moe.*'",
    ),
    "without the names before it": ([{"params": ["0.moe.*"], "lr": 1.0}], "did you mean '*0.moe.*'?"),
    "a word that is nearly one": ([{"params": ["embedding.*"], "lr": 1.0}], "did you mean '*embed*'?"),
    "unknown key": ([{"params": ["*"], "learning_rate": 1.0}], "optim.groups[0].learning_rate: unknown key"),
    "frozen with a rate": ([{"params": ["*.moe.*"], "frozen": True, "lr": 1.0}], "groups[0].frozen"),
    "no pattern": ([{"lr": 1.0}], "groups[0].params: expected patterns"),
    "no setting": ([{"params": ["*.moe.*"]}], "optim.groups[0]: expected a setting"),
    "two rates": ([{"params": ["*.moe.*"], "lr": 1.0, "lr_scale": 2.0}], "groups[0].lr_scale: expected"),
    "negative rate": ([{"params": ["*.moe.*"], "lr": -1.0}], "groups[0].lr: expected a number 0 or more"),
    "betas of one": ([{"params": ["*.moe.*"], "betas": [0.9]}], "optim.groups[0].betas: expected"),
    "beta of one": ([{"params": ["*.moe.*"], "betas": [0.9, 1.0]}], "groups[0].betas: expected a number"),
    "a name twice": (
        [{"params": ["*.moe.down"], "lr": 1.0}, {"params": ["*.moe.down"], "lr": 2.0}],
        "groups[1].name: expected a name of its own",
    ),
    "the optimizer's own name": (
        [{"params": ["*.moe.down"], "name": "decayed", "lr": 1.0}],
        "groups[0].name: expected another name, got 'decayed'",
    ),
    "a name of a part": (
        [{"params": ["*.moe.down"], "name": "slow (muon)", "lr": 1.0}],
        "groups[0].name: expected another name, got 'slow (muon)'",
    ),
    "a string": ([{"params": "*.bias", "lr": 1.0}], "optim.groups[0].params: expected a list"),
    "everything frozen": ([{"params": ["*"], "frozen": True}], "optim.groups: expected something"),
}  # fmt: skip


def built(groups: list[dict[str, Any]], **optim: Any) -> Config:
    problems: list[str] = []
    config = build_config({"optim": {"groups": groups, **optim}}, {}, 1, problems, needs_data=False)
    if config is None:
        raise ConfigError(*problems)
    return config


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_group_is_refused_by_name_before_the_model_is_sharded(mistake: str) -> None:
    groups, told = WRONG[mistake]
    with pytest.raises(ConfigError, match=re.escape(told)):
        freeze(reference(), built(groups).optim.groups)


def test_a_group_of_sgd_has_no_betas_and_one_of_small_moments_no_slow_one() -> None:
    with pytest.raises(ConfigError, match=r"groups\[0\]\.betas: expected optim\.name"):
        built([{"params": ["*"], "betas": [0.9, 0.95]}], name="sgd")
    with pytest.raises(ConfigError, match=r"optim\.beta2: 0\.999"):
        built([{"params": ["*"], "betas": [0.9, 0.999]}], moment_dtype="float8")


def test_a_group_of_adapters_base_weights_is_refused() -> None:
    model = reference()
    model.layers[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"groups\[0\]\.params: expected trained parameters"):
        freeze(model, (GroupConfig(params=("layers.0.*",), lr=1.0),))


def test_a_group_has_its_own_peak_and_warm_up() -> None:
    config = OptimConfig(
        lr=1.0, warmup_steps=10,
        groups=(GroupConfig(name="slow", params=("*",), lr_scale=0.25, warmup_steps=20),),
    )  # fmt: skip
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "name": name} for name in ("slow", "slow (not decayed)", "decayed")],
        lr=0,
    )
    set_learning_rates(optimizer, config, 10, 100)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125, 1.0]
    set_learning_rates(optimizer, config, 60, 100)
    assert optimizer.param_groups[2]["lr"] == learning_rate(config, 60, 100)
    still = replace(config, groups=(GroupConfig(name="slow", params=("*",), lr=0.0),))
    set_learning_rates(optimizer, still, 10, 100)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 1.0]


def adamw_like_torch() -> dict[str, Any]:
    model = shard_tiny(Case(), build_meshes())
    ours, theirs = AdamW(model.parameters()), torch.optim.AdamW([torch.zeros(1)])
    told = {}
    for name, make in {
        "amsgrad": lambda: AdamW(model, amsgrad=True),
        "later": lambda: ours.add_param_group({"params": [torch.zeros(1)]}),
        "plain": lambda: AdamW([torch.zeros(1)]),
        "patterns": lambda: AdamW(model.parameters(), groups=GROUPS),
        "unfrozen": lambda: AdamW(model, groups=(GroupConfig(params=("*.moe.*",), frozen=True),)),
    }.items():
        with pytest.raises(ConfigError) as caught:
            make()
        told[name] = str(caught.value)
    AdamW(model, fused=True, foreach=None, capturable=False)
    mine = {key: ours.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay")}
    same = mine == {key: theirs.param_groups[0][key] for key in mine}
    some = AdamW(model.layers[0].parameters())
    return {"told": told, "same": same, "share": some.moment_bytes.device / ours.moment_bytes.device}


def test_adamw_has_torchs_defaults_and_refuses_what_it_has_not() -> None:
    found = run_ranks(adamw_like_torch, 1)[0]
    assert found["same"]
    assert 0 < found["share"] < 0.5  # moments of the parameters that it was given
    assert "expected amsgrad = False" in found["told"]["amsgrad"]
    assert "got one more" in found["told"]["later"]
    assert "take model.parameters() after" in found["told"]["plain"]
    assert "pass the model" in found["told"]["patterns"]
    assert "freeze(model, groups) before" in found["told"]["unfrozen"]
