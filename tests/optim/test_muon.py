"""Muon over flat shards against a reference in plain torch on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models.config import preset_config
from fsdmoe.models.decoder import build_model
from fsdmoe.optim import AdamW, GroupConfig, Muon, MuonConfig, OptimConfig, count_state, grad_norm
from fsdmoe.optim.muon import head_rows
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_plain, run_sharded, shard_tiny
from tests.support.moment_case import backward, build
from tests.support.muon_reference import ReferenceMuon
from tests.support.tiny_modules import reference

# AdamW's first updates are the sign of even the tiniest gradient, unless eps is large.
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.2}
LEFT = ("embed.weight", "head.weight", "gate.weight")


def split(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Experts apart, and their gates and ups."""
    if tensor.dim() < 2 or name.endswith(LEFT):
        return []
    if tensor.dim() == 2:
        return [tensor]
    parts = 2 if name.endswith("gate_up") else 1
    return [matrix for expert in tensor for matrix in expert.chunk(parts)]


def train_both(case: Case, steps: int, dtype: str, scale: str) -> tuple[float, float]:
    """The worst difference of weights and of losses."""
    model = shard_tiny(case, build_meshes(**case.degrees))
    optimizer = Muon(model, muon=MuonConfig(ns_dtype=dtype, scale=scale), **SETTINGS)  # type: ignore[arg-type]
    plain = reference(**case.model) if dist.get_rank() == 0 else None
    theirs = (
        None if plain is None else ReferenceMuon(plain.named_parameters(), split, scale=scale, **SETTINGS)
    )
    worst_loss = 0.0
    for step in range(steps):
        loss, _ = run_sharded(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
        if plain is not None and theirs is not None:
            wanted, _ = run_plain(plain, case, step)
            worst_loss = max(worst_loss, relative(loss, wanted))
            theirs.step()
    wholes = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if plain is None:
        return 0.0, 0.0
    targets = dict(plain.named_parameters())
    return max(relative(whole, targets[name].detach()) for name, whole in wholes.items()), worst_loss


# cp shards like dp here: every rank of this model brings tokens of its own.
SAMPLE: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (1, {}, {}),
    (4, {"dp_outer": 2, "ep": 2}, {"micro_batches": 2}),
    (4, {"tp": 2, "etp": 2}, {}),
]


@pytest.mark.parametrize(
    ("world", "degrees", "changes"), [pytest.param(*SAMPLE[0], marks=pytest.mark.full), *SAMPLE[1:]]
)
def test_weights_follow_the_reference_on_one_process(
    world: int, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    case = Case(degrees=degrees, **changes)
    steps = 10 if world == 1 else 3
    weights, losses = run_ranks(train_both, world, case, steps, "float32", "match_rms_adamw")[0]
    assert weights < 1e-5
    assert losses < 1e-5


WHOLE: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    *SAMPLE[1:],
    *((world, {}, {}) for world in range(2, 9)),
    (2, {"tp": 2}, {}),
    (2, {"etp": 2}, {}),
    (2, {"cp": 2}, {}),
    (2, {"dp_outer": 2}, {}),
    (4, {"cp": 2, "ep": 4}, {}),
    (4, {"tp": 2, "ep": 2}, {}),
    (4, {"tp": 4}, {"micro_batches": 2}),
    (4, {"ep": 2, "etp": 2}, {}),
    (6, {"ep": 2}, {}),
    (6, {"dp_outer": 3, "etp": 2}, {}),
    (8, {"ep": 8}, {}),
    (8, {"cp": 2, "tp": 2, "ep": 4}, {}),
    (8, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}, {"micro_batches": 2}),
    (8, {"dp_outer": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    (3, {}, {"fsdp": {"granule": "rows"}}),
    (3, {}, {"fsdp": {"granule": "tensor"}}),
    (2, {}, {"fsdp": {"shard": "optimizer"}}),
    (2, {"ep": 2}, {"fsdp": {"lean": True}}),
    (2, {}, {"model": {"tied": True}}),
]


@pytest.mark.full
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize(("world", "degrees", "changes"), WHOLE)
def test_every_layout_follows_the_reference(
    world: int, degrees: dict[str, int], changes: dict[str, Any], scale: str
) -> None:
    case = Case(degrees=degrees, **changes)
    weights, losses = run_ranks(train_both, world, case, 10, "float32", scale)[0]
    assert weights < 1e-5
    assert losses < 1e-5


def test_products_are_in_float32_on_a_cpu_unless_another_dtype_is_written() -> None:
    assert [MuonConfig().ns_dtype_on(device) for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
    assert MuonConfig(ns_dtype="bfloat16").ns_dtype_on("cpu") == "bfloat16"
    weights, _ = run_ranks(train_both, 1, Case(), 2, "auto", "original")[0]
    assert weights < 1e-5


def test_bfloat16_stays_within_its_error_of_the_reference() -> None:
    weights, losses = run_ranks(train_both, 2, Case(), 5, "bfloat16", "original")[0]
    assert 1e-5 < weights < 5e-2
    assert losses < 1e-2


def wholes(model: torch.nn.Module, optimizer: Muon) -> dict[str, list[float]]:
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, state in optimizer.checkpoint_state()["state"].items():
        for key, tensor in state.items():
            found[f"{name} {key}"] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return {name: tensor.detach().flatten().tolist() for name, tensor in found.items()}


def save(degrees: dict[str, int], folder: str) -> dict[str, list[float]]:
    case = Case(degrees=degrees)
    model = shard_tiny(case, build_meshes(**degrees))
    optimizer = Muon(model, muon=MuonConfig(ns_dtype="float32"), **SETTINGS)
    for step in range(2):
        run_sharded(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, model, optimizer)
    return wholes(model, optimizer)


def load(degrees: dict[str, int], folder: str) -> dict[str, list[float]]:
    model = shard_tiny(Case(), build_meshes(**degrees))
    optimizer = Muon(model, **SETTINGS)
    checkpoint.load(folder, model, optimizer)
    found = wholes(model, optimizer)
    run_sharded(model, Case(degrees=degrees), 2)
    optimizer.step()
    return found


RESHARDED = [
    (3, {}), (4, {"dp_outer": 2, "ep": 2}), (4, {"tp": 2, "etp": 2}), (1, {}), (2, {"cp": 2}), (4, {"ep": 4}),
]  # fmt: skip


def test_a_resharded_resume_has_the_bits_that_were_saved(tmp_path: Path) -> None:
    saved = run_ranks(save, 3, {}, str(tmp_path / "c"))[0]
    assert sum(name.endswith(" momentum_buffer") for name in saved) == 3 * 8
    assert run_ranks(load, 2, {"tp": 2, "etp": 2}, str(tmp_path / "c"))[0] == saved


@pytest.mark.full
@pytest.mark.parametrize(("world", "degrees"), RESHARDED)
def test_every_layout_resumes_on_every_other(world: int, degrees: dict[str, int], tmp_path: Path) -> None:
    saved = run_ranks(save, world, degrees, str(tmp_path / "c"))[0]
    for other, mesh in RESHARDED:
        assert run_ranks(load, other, mesh, str(tmp_path / "c"))[0] == saved


def take_up_another(folder: str, first: str) -> str:
    model = shard_tiny(Case(), build_meshes())
    kinds = {"adamw": lambda: AdamW(model), "muon": lambda: Muon(model)}
    checkpoint.save(folder, model, kinds[first]())
    other = kinds["muon" if first == "adamw" else "adamw"]()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        checkpoint.load(folder, model, other)
    return str(caught.value)


@pytest.mark.parametrize("first", ["adamw", "muon"])
def test_the_state_of_adamw_is_not_taken_for_muons_nor_the_other_way_round(
    first: str, tmp_path: Path
) -> None:
    told = run_ranks(take_up_another, 1, str(tmp_path / "c"), first)[0]
    assert ("momentum_buffer" if first == "adamw" else "exp_avg") in told
    assert "leave it out by load_only_model = true in [checkpoint]" in told


def left_alone() -> dict[str, bool]:
    """A step with a non-finite gradient changes nothing; a unit that took no part neither."""
    case = Case(model={"plan": (0, 2)})
    model = shard_tiny(case, build_meshes())
    optimizer = Muon(model, **SETTINGS)
    run_sharded(model, case, 0)
    optimizer.step()
    optimizer.zero_grad()
    kept = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    states = wholes(model, optimizer)
    run_sharded(model, case, 1)
    next(p for p in model.parameters() if p.piece.numel() and p.dim() == 2).grad.piece[0] = float("nan")
    optimizer.step(found_inf=grad_norm(model).found_inf)
    optimizer.zero_grad()
    found = {"skipped": wholes(model, optimizer) == states}
    run_sharded(model, case, 2)
    optimizer.step()
    same = {name: torch.equal(kept[name], p.full_tensor()) for name, p in model.named_parameters()}
    found["unit"] = {n for n, is_same in same.items() if is_same} == {
        n for n in same if n.startswith("layers.1.")
    }
    return found


def test_a_skipped_step_and_a_unit_that_was_not_run_change_nothing() -> None:
    for found in run_ranks(left_alone, 2):
        assert all(found.values()), found


def state_bytes(degrees: dict[str, int]) -> tuple[int, int, int]:
    model = shard_tiny(Case(), build_meshes(**degrees))
    engine = engine_of(model)
    plans = [group.plan for group in engine.groups]
    planned = count_state(OptimConfig(name="muon"), engine.policy.precision)(plans, engine.meshes)
    return Muon(model).moment_bytes.device, planned.device, AdamW(model).moment_bytes.device


def test_the_plan_counts_one_momentum_of_matrices() -> None:
    for held, planned, adamw in run_ranks(state_bytes, 4, {"ep": 2}):
        assert held == planned
        assert held < 0.7 * adamw


def groups_of_muon() -> tuple[dict[str, int], str]:
    model = shard_tiny(Case(), build_meshes())
    groups = (
        GroupConfig(name="by AdamW", params=("*.mlp.*",), optimizer="adamw"),
        GroupConfig(name="routers", params=("*.gate.weight",), optimizer="muon", lr=1.0),
    )
    optimizer = Muon(model, groups=groups)
    with pytest.raises(ConfigError) as caught:
        Muon(model, groups=(GroupConfig(params=("*norm*",), optimizer="muon"),))
    return {group["name"]: len(group["params"]) for group in optimizer.param_groups}, str(caught.value)


def test_groups_say_who_updates_them() -> None:
    counts, told = run_ranks(groups_of_muon, 1)[0]
    assert counts["by AdamW"] == 6
    assert counts["routers (muon)"] == 3
    assert counts["muon"] == 3 * 6
    assert "expected matrices for Muon in '*norm*', got layers.0.norm.weight (16,)" in told


def test_heads_are_found_in_attention_and_in_latent_attention() -> None:
    model = build_model(preset_config("tiny-qwen3"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[parameter].rpartition("self_attn.")[2]: rows for parameter, rows in head_rows(model).items()
    }
    assert found == {"q_proj.weight": 8, "k_proj.weight": 8, "v_proj.weight": 8}
    config = preset_config("tiny-deepseek-v3")
    model = build_model(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[parameter].rpartition("self_attn.")[2]: rows for parameter, rows in head_rows(model).items()
    }
    assert found["kv_b_proj.weight"] == config.qk_nope_head_dim + config.v_head_dim
    with pytest.raises(ConfigError, match=r"^optim\.muon\.heads"):
        head_rows(torch.nn.Linear(2, 2))


def by_heads(degrees: dict[str, int], heads: str) -> float:
    """On rank 0 the worst difference of weights after three steps with gradients that no mesh changes."""
    model = build(degrees)
    optimizer = Muon(model, muon=MuonConfig(ns_dtype="float32", heads=heads), **SETTINGS)  # type: ignore[arg-type]
    named = [(name, torch.nn.Parameter(p.full_tensor())) for name, p in model.named_parameters()]

    def native(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")) or tensor.dim() < 2:
            return []
        if heads == "each" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            return list(tensor.split(8))
        parts = 2 if name.endswith("gate_up_proj") else 1
        return [tensor] if tensor.dim() == 2 else [m for expert in tensor for m in expert.chunk(parts)]

    theirs = ReferenceMuon(named, native, **SETTINGS)
    for number in range(3):
        backward(model)
        for index, (name, parameter) in enumerate(named):
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(9 * number + index)
            )
            dict(model.named_parameters())[name].grad.copy_(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            theirs.step()
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return max(relative(found[name], target.detach()) for name, target in named)


@pytest.mark.parametrize(("world", "degrees", "heads"), [(2, {"tp": 2}, "each"), (3, {}, "each")])
def test_heads_can_be_matrices_of_their_own(world: int, degrees: dict[str, int], heads: str) -> None:
    assert run_ranks(by_heads, world, degrees, heads)[0] < 1e-5
