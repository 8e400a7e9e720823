"""Models whose parameters come as DTensors train as one process does; their checkpoints fit any layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.experts.parallel import split_experts
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, ShardedTensor, engine_of, fully_shard
from fsdmoe.fsdp.dtensor import DTensorView
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.dtensor_models import WAYS, build, optimizer_of, tokens_of, train_beside

FP32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
TOLERANCE = 1e-5


def trains(way: str, optimizer: str, degrees: dict[str, int], fsdp: dict[str, object]) -> dict[str, float]:
    meshes = build_meshes(**degrees)
    model, plain = build(), build()
    WAYS[way](model, meshes[Axis.TP])
    parallelize(model, meshes, ParallelPolicy(fsdp=FSDPConfig(**fsdp), precision=FP32))
    assert all(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
    return train_beside(model, plain, meshes, optimizer, num_steps=2)


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        # SGD sees the scale of gradients, which is what a way could get wrong. The next tests have the stock
        # styles and those for sequences.
        pytest.param(
            way,
            optimizer,
            marks=pytest.mark.full if optimizer == "adamw" or way.endswith("_styles") else (),
        )
        for way in WAYS
        for optimizer in ("sgd", "adamw")
    ],
)
def test_a_model_of_dtensors_trains_as_one_process_does(way: str, optimizer: str) -> None:
    for worst in run_ranks(trains, 4, way, optimizer, {"tp": 2}, {}):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize(
    "way", ["by_stock_styles", pytest.param("by_sequence_styles", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "fsdp",
    [
        {"lean": True},
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ({"cpu_offload": True}, {"debug": True}, {"shard": "optimizer"})
        ),
    ],
    ids=str,
)
def test_so_it_does_under_every_way_to_shard(way: str, fsdp: dict[str, object]) -> None:
    for worst in run_ranks(trains, 4, way, "sgd", {"tp": 2}, fsdp):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize(
    "way", [pytest.param("by_stock_styles", marks=pytest.mark.full), "by_sequence_styles"]
)
@pytest.mark.parametrize(
    "degrees", [pytest.param({"tp": 4}, marks=pytest.mark.full), {"tp": 2, "dp_outer": 2}], ids=str
)
def test_so_it_does_on_other_meshes(degrees: dict[str, int], way: str) -> None:
    for worst in run_ranks(trains, 4, way, "sgd", degrees, {}):
        assert max(worst.values()) < TOLERANCE, worst


def sees() -> None:
    """During forward and backward a parameter is a DTensor around the gathered buffer, always the same."""
    meshes = build_meshes(tp=2)
    model = build()
    WAYS["by_sequence_styles"](model, meshes[Axis.TP])
    fully_shard(model, meshes)
    layer, seen = model.layers[1], []
    layer.up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    for step in range(2):
        model(tokens_of(step, 0)).backward()
        assert isinstance(layer.up.weight, ShardedTensor)
        assert layer.up.weight.shape == seen[0].shape == (32, 16)
    assert seen[0] is seen[1]
    assert isinstance(seen[0], DTensor)
    assert isinstance(seen[0], nn.Parameter)
    assert seen[0].placements == (Shard(0),)
    assert seen[0].device_mesh == meshes[Axis.TP]
    unit = next(unit for unit in engine_of(model).units if unit.module is layer)
    assert unit.slot is not None
    held = seen[0].to_local()
    assert held.untyped_storage().data_ptr() in {
        b.untyped_storage().data_ptr() for b in unit.slot.buffers.values()
    }
    assert layer.up.weight.placement.cuts == ((Axis.TP, Shard(0)),)
    assert layer.norm.weight.placement.cuts == ()


def test_inside_of_forward_a_parameter_is_a_dtensor_around_the_gathered_buffer() -> None:
    run_ranks(sees, 4)


def evaluates() -> None:
    """Under inference mode, before any training and after a step; the losses are those under no_grad."""
    meshes = build_meshes(tp=2)
    model = build()
    WAYS["by_stock_styles"](model, meshes[Axis.TP])
    fully_shard(model, meshes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with torch.inference_mode():
            inferred = model(tokens_of(step, 0)).item()
        with torch.no_grad():
            assert inferred == model(tokens_of(step, 0)).item()
        model(tokens_of(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_of_dtensors_is_evaluated_under_inference_mode() -> None:
    run_ranks(evaluates, 4)


def gradients_of_every_placement() -> None:
    mesh = build_meshes(tp=2)[Axis.TP]
    whole = torch.arange(12.0).view(4, 3)
    parts = {
        Replicate(): whole,
        Partial(): whole * (0.25 if mesh.get_local_rank() == 0 else 0.75),
        Shard(0): whole.chunk(2)[mesh.get_local_rank()],
        Partial("avg"): whole,
    }
    for own in (Shard(0), Replicate()):
        view = DTensorView(mesh, (own,), (4, 3))
        for arrived, local in parts.items():
            got, share = view.local_gradient(DTensor.from_local(local, mesh, [arrived]))
            assert type(got) is torch.Tensor
            got = got * share
            if own == Replicate():  # what the sum over the shard axis, which spans tp, makes of it
                dist.all_reduce(got, group=mesh.get_group())
                assert torch.equal(got, whole), arrived
            else:
                assert torch.equal(got, whole.chunk(2)[mesh.get_local_rank()]), arrived
    kept, share = DTensorView(mesh, (Replicate(),), (4, 3)).local_gradient(
        DTensor.from_local(parts[Partial()], mesh, [Partial()])
    )
    assert share == 1.0
    assert kept.data_ptr() == parts[Partial()].data_ptr(), "what is summed later must not be summed now"


def test_a_gradient_of_any_placement_enters_the_buffer_as_the_sum_wants_it() -> None:
    run_ranks(gradients_of_every_placement, 2)


def own_mesh(names: tuple[str, str], degrees: dict[str, int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = parallelize_module(build(), mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, build_meshes(**degrees))
    model(tokens_of(0, 0)).backward()


def own_meshes() -> list[str]:
    """A mesh that fits, and what is said of two that do not."""
    own_mesh(("dp", "tp"), {"tp": 2})
    told = []
    for names, degrees in ((("tp", "dp"), {"tp": 2}), (("dp", "tp"), {})):
        with pytest.raises(ConfigError) as caught:
            own_mesh(names, degrees)
        told.append(str(caught.value))
    return told


def test_a_mesh_of_the_users_own_is_taken_if_its_ranks_are_those_of_ours() -> None:
    other, none = run_ranks(own_meshes, 4)[0]
    wrong = (
        r"fsdp: head\.weight is a DTensor: dim 'tp' of its DeviceMesh.*, ranks \[0, 2\], is no axis that "
        r"splits parameters here; expected this rank's tp \[0, 1\]: take the mesh from meshes\[Axis.TP\]"
    )
    assert re.search(wrong, other)
    assert "expected none, for mesh.tp, mesh.ep and mesh.etp are 1" in none


class OwnTokens(nn.Module):
    """A plain scale on a rank's own tokens, behind a layer that torch split."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        parallelize_module(self.up, mesh, ColwiseParallel(output_layouts=Shard(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * self.scale).sum()


def own_tokens() -> None:
    meshes = build_meshes(tp=2)
    model = OwnTokens(meshes[Axis.TP])
    fully_shard(model, meshes, FSDPPolicy(fsdp=FSDPConfig(debug=True), precision=FP32))
    with pytest.raises(RuntimeError, match=r"the gradient of scale differs among the ranks of tp.*Replicate"):
        model(torch.arange(16.0).view(4, 4)).backward()


def test_debug_finds_a_plain_parameter_that_sees_its_ranks_own_tokens() -> None:
    run_ranks(own_tokens, 2)


def mixed() -> None:
    meshes = build_meshes(tp=2, ep=2)
    model = build()
    WAYS["by_stock_styles"](model, meshes[Axis.TP])
    model.experts = GroupedExperts(4, 8, 8)
    split_experts(model.experts, meshes)
    with pytest.raises(ConfigError, match=r"fsdmoe split experts\.gate_up_proj over ep, etp, but DTensors"):
        fully_shard(model, meshes)


def test_what_fsdmoe_split_has_no_place_beside_what_torch_split() -> None:
    run_ranks(mixed, 2)


def uneven() -> None:
    meshes = build_meshes(tp=2)
    model = nn.Sequential(nn.Linear(4, 5, bias=False))
    mesh = meshes[Axis.TP]
    model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match=r"0\.weight is a DTensor: mesh\.tp: 2 ranks cannot split dim 0 of"):
        fully_shard(model, meshes)
    local = torch.zeros(1 + 2 * mesh.get_local_rank(), 4)
    ragged = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1))
    model[0].weight = nn.Parameter(ragged)
    with pytest.raises(ConfigError, match=r"placements mean \(2, 4\) on this rank, but it holds"):
        fully_shard(model, meshes)


def test_uneven_cuts_are_refused_by_name() -> None:
    run_ranks(uneven, 2)


def saves(folder: str) -> list[float]:
    """Two steps, a checkpoint, two more."""
    meshes = build_meshes(tp=2)
    model, losses = build(), []
    WAYS["by_sequence_styles"](model, meshes[Axis.TP])
    parallelize(model, meshes, ParallelPolicy(precision=FP32))
    optimizer = optimizer_of("adamw", model)
    for step in range(4):
        if step == 2:
            checkpoint.save(Path(folder) / "ckpt", model, optimizer)
        losses.append(one_step(model, optimizer, step, meshes.rank(Axis.BATCH)))
    return losses


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, part: int) -> float:
    loss = model(tokens_of(step, part))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def resumes(folder: str, way: str, degrees: dict[str, int]) -> list[float]:
    meshes = build_meshes(**degrees)
    model = build(seed=1)
    if way:
        WAYS[way](model, meshes[Axis.TP])
    parallelize(model, meshes, ParallelPolicy(precision=FP32))
    optimizer = optimizer_of("adamw", model)
    checkpoint.load(Path(folder) / "ckpt", model, optimizer)
    return [one_step(model, optimizer, step, meshes.rank(Axis.BATCH)) for step in range(2, 4)]


@pytest.mark.parametrize(
    ("world", "way", "degrees"),
    [
        (4, "by_stock_styles", {"tp": 2, "dp_outer": 2}),
        pytest.param(2, "", {}, marks=pytest.mark.full),
    ],
)
def test_a_model_of_dtensors_resumes_under_any_other_layout(
    world: int, way: str, degrees: dict[str, int], tmp_path: Path
) -> None:
    saved = run_ranks(saves, 4, str(tmp_path))
    wanted = {0: saved[0][2:], 1: saved[2][2:]}  # by part of the data
    for rank, losses in enumerate(run_ranks(resumes, world, str(tmp_path), way, degrees)):
        part = rank // degrees.get("tp", 1)
        assert losses == pytest.approx(wanted[part], rel=TOLERANCE), rank
