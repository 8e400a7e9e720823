"""Moments in eight bits: the same numbers on every mesh, kept exactly by checkpoints, close to float32's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import FSDPPolicy, engine_of
from fsdmoe.fsdp.layout import Item, plan_layout
from fsdmoe.fsdp.memory_plan import PlannedMeshes, plan_memory
from fsdmoe.mesh import build_meshes
from fsdmoe.models import StepCounts, build_model
from fsdmoe.optim import AdamW, OptimConfig
from fsdmoe.optim.moments import MomentPolicy, moment_bytes
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.moment_case import MODEL, State, build, state_of, step

LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}), (2, {}), (3, {}), (4, {}), (4, {"ep": 2}), (2, {"tp": 2}), (4, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"dp_outer": 2, "ep": 2}),
]  # fmt: skip


def train_and_save(degrees: dict[str, int], folder: str, formats: Any) -> tuple[State, State]:
    """The state after three steps, which is saved, and after four."""
    model = build(degrees)
    optimizer = AdamW(model, lr=1e-2, betas=(0.9, 0.95), moment_dtype=formats)
    for number in range(3):
        step(model, optimizer, number)
    if folder:
        checkpoint.save(folder, model, optimizer)
    saved = state_of(model, optimizer)
    step(model, optimizer, 3)
    return saved, state_of(model, optimizer)


def load_and_go_on(degrees: dict[str, int], folder: str, formats: Any) -> tuple[State, State]:
    model = build(degrees)
    optimizer = AdamW(model, lr=1e-2, betas=(0.9, 0.95), moment_dtype=formats)
    checkpoint.load(folder, model, optimizer)
    loaded = state_of(model, optimizer)
    step(model, optimizer, 3)
    return loaded, state_of(model, optimizer)


def test_a_mesh_changes_no_bit_and_a_resume_on_another_goes_on_alike(tmp_path: Path) -> None:
    saved, later = run_ranks(train_and_save, 3, {}, str(tmp_path / "c"), "float8")[0]
    names = ("exp_avg_codes", "exp_avg_exponents", "exp_avg_sq_codes", "exp_avg_sq_exponents")
    assert all(sum(key.endswith(f" {name}") for key in saved) >= 10 for name in names)
    assert any(key.endswith(" exp_avg") for key in saved), "norms stay in float32"
    assert saved != later
    assert run_ranks(train_and_save, 1, {}, "", "float8")[0] == (saved, later)
    degrees = {"tp": 2, "etp": 2}
    assert run_ranks(load_and_go_on, 2, degrees, str(tmp_path / "c"), "float8")[0] == (saved, later)


@pytest.mark.full
@pytest.mark.parametrize(("world", "degrees"), LAYOUTS)
def test_every_mesh_has_the_same_bits_and_resumes_on_every_other(
    world: int, degrees: dict[str, int], tmp_path: Path
) -> None:
    wanted = run_ranks(train_and_save, 2, {}, "", "float8")[0]
    assert run_ranks(train_and_save, world, degrees, str(tmp_path / "c"), "float8")[0] == wanted
    for other, mesh in LAYOUTS:
        assert run_ranks(load_and_go_on, other, mesh, str(tmp_path / "c"), "float8")[0] == wanted


@pytest.mark.full
@pytest.mark.parametrize("formats", [("float8", torch.float32), (torch.bfloat16, "float8")])
def test_a_format_for_each_moment_resumes_on_another_mesh(formats: Any, tmp_path: Path) -> None:
    saved, later = run_ranks(train_and_save, 3, {}, str(tmp_path / "c"), formats)[0]
    assert any(key.endswith("_codes") for key in saved)
    degrees = {"tp": 2, "ep": 2, "etp": 2}
    assert run_ranks(load_and_go_on, 4, degrees, str(tmp_path / "c"), formats)[0] == (saved, later)


def losses(formats: Any, steps: int) -> list[float]:
    model = build({})
    optimizer = AdamW(model, lr=3e-3, betas=(0.9, 0.95), moment_dtype=formats)
    found = []
    for _ in range(steps):
        rows = torch.randint(80, (8, 16), generator=torch.Generator().manual_seed(len(found) % 4))
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        counts = StepCounts.from_vector(
            model.count_tokens(rows, torch.ones_like(rows, dtype=torch.bool), None)
        )
        loss = model(mine, labels_BS=mine, counts=counts).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        found.append(loss.item())
    return found


def test_training_follows_float32_and_other_numbers_of_ranks() -> None:
    plain, small = (run_ranks(losses, 1, formats, 10)[0] for formats in (torch.float32, "float8"))
    other = run_ranks(losses, 2, "float8", 6)[0]
    assert plain[-1] < 0.7 * plain[0], "it learns"
    assert small[2:] != plain[2:]
    assert small == pytest.approx(plain, rel=1e-2)
    # Sums in another order, rounded by the same chances; what that changes grows from step to step.
    assert other == pytest.approx(small[:6], rel=1e-3)


def planned_and_held() -> tuple[int, int, int]:
    meshes, policy = build_meshes(), MomentPolicy("float8", "float8")
    count = moment_bytes(policy)
    sharding = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32"))
    model = build_model(MODEL)
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module.experts, PlannedMeshes(meshes.degrees))
    planned = plan_memory(model, meshes.degrees, sharding, moments=count).moments
    model = build({})
    held, plain = (
        AdamW(model, betas=(0.9, 0.95), moment_dtype="float8").moment_bytes,
        AdamW(model).moment_bytes,
    )
    return planned, held.device, plain.device


def test_a_plan_counts_what_is_held_and_it_is_a_quarter() -> None:
    planned, held, plain = run_ranks(planned_and_held, 2)[0]
    assert planned == held
    assert held == pytest.approx(plain / 4, rel=0.05)


def refused(degrees: dict[str, int]) -> str:
    with pytest.raises(ConfigError) as error:
        AdamW(build(degrees), betas=(0.9, 0.95), moment_dtype="float8")
    return str(error.value)


def test_a_mesh_that_would_cut_a_block_is_refused_with_the_way_out() -> None:
    for message in run_ranks(refused, 4, {"ep": 1, "etp": 4}):
        assert "mesh.etp = 4 leaves 32 side by side of model.layers.0.mlp.experts" in message
        assert "or bfloat16" in message


@pytest.mark.parametrize("granule", [1, 48, 80, 64 * 80])
@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_no_layout_cuts_a_block_whatever_its_granules(granule: int, num_ranks: int) -> None:
    items = [Item("a", 64 * 80, granule), Item("b", 33, granule), Item("c", 4801, granule)]
    layout = plan_layout(items, num_ranks)
    for rank in range(num_ranks):
        assert all(owned.start % 64 == 0 for owned in layout.owned(rank) if owned.numel)


def test_a_second_moment_that_eight_bits_cannot_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.beta2: 0\.999 .*float8 can hold; choose at most 0\.99"):
        OptimConfig(beta2=0.999, moment_dtype="float8")
    assert OptimConfig(beta2=0.999, moment_dtype="float8", second_moment_dtype="float32").moment_dtypes == (
        "float8",
        "float32",
    )


def load_plain_state(folder: str) -> str:
    model = build({})
    optimizer = AdamW(model)
    step(model, optimizer, 0)
    checkpoint.save(folder, model, optimizer)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(folder, model, AdamW(model, betas=(0.9, 0.95), moment_dtype="float8"))
    return str(error.value)


def test_moments_of_another_kind_are_not_taken_for_codes(tmp_path: Path) -> None:
    message = run_ranks(load_plain_state, 1, str(tmp_path / "c"))[0]
    assert "exp_avg_codes" in message


def release_and_go_on() -> tuple[State, State]:
    found = []
    for releases in (False, True):
        model = build({})
        optimizer = AdamW(model, lr=1e-2, betas=(0.9, 0.95), moment_dtype="float8")
        step(model, optimizer, 0)
        if releases:
            engine_of(model).release(optimizer)
            engine_of(model).restore()
        step(model, optimizer, 1)
        found.append(state_of(model, optimizer))
    return found[0], found[1]


def test_their_memory_can_be_given_away_for_a_while() -> None:
    plain, released = run_ranks(release_and_go_on, 1)[0]
    assert plain == released
