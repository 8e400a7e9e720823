"""Moments in torchao's formats: torchao's own numbers, on every mesh and after a resume on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy
from fsdmoe.fsdp.memory_plan import PlannedMeshes, plan_memory
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model
from fsdmoe.optim import AdamW, OptimConfig
from fsdmoe.optim.moments import MomentPolicy, moment_bytes
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.moment_case import FP32, MODEL, State, build, plain_step, state_of, step

THEIRS = {"torchao_8bit": "AdamW8bit", "torchao_4bit": "AdamW4bit", "torchao_float8": "AdamWFp8"}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LAYOUTS: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (4, {}), (4, {"ep": 2})]


def sharded(degrees: dict[str, int], kept: Any) -> tuple[Any, AdamW]:
    model = build(degrees, granule_size=256)
    return model, AdamW(model, moment_dtype=kept, **SETTINGS)


def differences(
    model: Any,
    optimizer: AdamW,
    params: dict[str, nn.Parameter],
    theirs: torch.optim.Optimizer,
    kept: str,
) -> list[str]:
    """What is not the same bit for bit; where torchao leaves moments in float32, within its rounding. All
    ranks gather, rank 0 compares."""
    found = []
    for name, parameter in model.named_parameters():
        kinds = sorted(key for key in optimizer.state[parameter] if key.startswith("exp_avg"))
        held = {f"{name} {key}": optimizer.state[parameter][key].full_tensor() for key in kinds}
        held[name] = parameter.full_tensor()
        if dist.get_rank() > 0:
            continue
        state = theirs.state[params[name]]
        expected = {name: params[name].detach()}
        has_codes = hasattr(state["exp_avg"], "scale")
        for key in ("exp_avg", "exp_avg_sq"):
            tensors = {key: state[key]}
            if has_codes:
                codes = state[key].codes.view(torch.uint8)
                tensors = {f"{key}_{kept}_codes": codes, f"{key}_{kept}_scales": state[key].scale}
            expected |= {f"{name} {k}": whole for k, whole in tensors.items()}
        for title, whole in expected.items():
            slack = 0.0 if has_codes else 1e-6
            if not torch.allclose(held[title].flatten(), whole.flatten(), rtol=slack, atol=0.1 * slack):
                found.append(title)
    return found


def train(degrees: dict[str, int], kept: str, folder: str) -> tuple[list[str], State, State]:
    """Next to torchao's optimizer of the plain model, on rank 0: what differs after two steps. The state
    then, which is saved, and after a third."""
    model, optimizer = sharded(degrees, kept)
    params = {name: nn.Parameter(p.full_tensor().clone()) for name, p in model.named_parameters()}
    decayed = [p for name, p in params.items() if p.dim() >= 2 and not name.endswith("bias")]
    others = [p for p in params.values() if all(p is not each for each in decayed)]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    theirs = getattr(torchao.optim, THEIRS[kept])(groups, **SETTINGS)
    for number in range(2):
        step(model, optimizer, number)
        if dist.get_rank() == 0:
            with torch.compiler.set_stance("force_eager"):  # compiled, it would need a C++ compiler
                plain_step(params, theirs, number)
    different = differences(model, optimizer, params, theirs, kept)
    if folder:
        checkpoint.save(folder, model, optimizer)
    saved = state_of(model, optimizer)
    step(model, optimizer, 2)
    return different, saved, state_of(model, optimizer)


def resume(degrees: dict[str, int], kept: str, folder: str) -> tuple[State, State]:
    model, optimizer = sharded(degrees, kept)
    checkpoint.load(folder, model, optimizer)
    loaded = state_of(model, optimizer)
    step(model, optimizer, 2)
    return loaded, state_of(model, optimizer)


@pytest.mark.parametrize(
    ("world", "degrees", "kept"),
    [
        (1, {}, "torchao_4bit"),
        (1, {}, "torchao_8bit"),
        (2, {"ep": 2}, "torchao_float8"),
        *(
            pytest.param(world, degrees, kept, marks=pytest.mark.full)
            for world, degrees in LAYOUTS
            for kept in THEIRS
        ),
    ],
)
def test_sharded_steps_are_torchaos_bit_for_bit_and_resume_elsewhere(
    world: int, degrees: dict[str, int], kept: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "c")
    different, *wanted = run_ranks(train, world, degrees, kept, folder)[0]
    assert different == []
    assert sum(key.endswith(f"exp_avg_sq_{kept}_codes") for key in wanted[0]) >= 10
    assert any(key.endswith(" exp_avg") for key in wanted[0]), "norms stay in float32"
    elsewhere = (2, {"ep": 2}) if world != 2 else (1, {}) if degrees else (3, {})
    assert run_ranks(resume, elsewhere[0], elsewhere[1], kept, folder)[0] == tuple(wanted)


def held_and_planned(kept: Any) -> tuple[int, int]:
    meshes = build_meshes()
    policy = FSDPPolicy(fsdp=FSDPConfig(granule_size=256), precision=FP32)
    count = moment_bytes(MomentPolicy(kept, kept))
    model = build_model(MODEL)
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module.experts, PlannedMeshes(meshes.degrees))
    planned = plan_memory(model, meshes.degrees, policy, moments=count).moments
    return sharded({}, kept)[1].moment_bytes.device, planned


@pytest.mark.parametrize(("kept", "bytes_each"), [("torchao_8bit", 2.03), ("torchao_4bit", 1.06)])
def test_a_plan_counts_what_is_held(kept: str, bytes_each: float) -> None:
    held, planned = run_ranks(held_and_planned, 1, kept)[0]
    assert held == planned
    numel = sum(p.numel() for p in build_model(MODEL).parameters())
    assert held == pytest.approx(numel * bytes_each, rel=0.05)


def cut(fsdp: dict[str, Any], degrees: dict[str, int]) -> str:
    with pytest.raises(ConfigError) as error:
        AdamW(build(degrees, **fsdp), moment_dtype="torchao_8bit", **SETTINGS)
    return str(error.value)


def test_slices_that_cut_blocks_are_refused_on_every_rank() -> None:
    messages = run_ranks(cut, 2, {"granule_size": 192}, {})
    assert len(set(messages)) == 1
    assert "torchao keeps 256 elements in a block, but fsdp.granule_size leaves" in messages[0]
    assert "expected a multiple of 256" in messages[0]


def test_a_mesh_that_cuts_blocks_is_refused_with_the_way_out() -> None:
    for message in run_ranks(cut, 2, {"granule_size": 256}, {"etp": 2}):
        assert "mesh.etp = 2 leaves 64 side by side of model.layers.0.mlp.experts" in message


def skip() -> bool:
    model, optimizer = sharded({}, "torchao_8bit")
    step(model, optimizer, 0)
    before = state_of(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step(found_inf=torch.ones(()))
    return state_of(model, optimizer) == before


def test_a_skipped_step_changes_nothing() -> None:
    assert run_ranks(skip, 2) == [True, True]


@pytest.mark.parametrize(
    ("precision", "given", "line"),
    [
        (PrecisionConfig(main_dtype="bfloat16", main_rounding="stochastic"), {}, "rounds main weights"),
        (FP32, {"state_offload": 0.5}, "takes the moments of whole pieces"),
        (FP32, {"moment_dtype": ("torchao_8bit", torch.float32)}, "got torchao_8bit and float32"),
    ],
)
def test_what_torchaos_update_does_not_do_is_refused(
    precision: PrecisionConfig, given: dict[str, Any], line: str
) -> None:
    assert line in run_ranks(refused, 1, precision, given)[0]


def refused(precision: PrecisionConfig, given: dict[str, Any]) -> str:
    model = build({}, precision, granule_size=256)
    with pytest.raises(ConfigError) as error:
        AdamW(model, **{"moment_dtype": "torchao_8bit", **SETTINGS, **given})
    return str(error.value)


def test_the_section_refuses_two_formats_of_torchao() -> None:
    with pytest.raises(ConfigError, match="got torchao_4bit and torchao_8bit; set moment_dtype alone"):
        OptimConfig(moment_dtype="torchao_8bit", first_moment_dtype="torchao_4bit")
