"""A sharded tensor speaks DTensor: exact both ways for every kind of split, refused by name elsewhere."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.placement import Placement, halves
from fsdmoe.fsdp.shard_layout import RaggedShard
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.testing import run_ranks
from tests.fsdp.test_sharded_tensor import PLACEMENTS, shard, whole_values

WIDE = Placement((6, 24, 5), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
SPLITS = PLACEMENTS | {
    "uneven vector": (Placement.whole((17,)), Axis.FSDP_TP),
    "fewer rows than ranks": (Placement.whole((2, 9)), Axis.FSDP_TP),
    "wide gate_up": (WIDE, Axis.EDP),
}
LAYOUTS = {
    3: [{}, {"ep": 3}, {"tp": 3}, {"etp": 3}],
    4: [{"tp": 2, "ep": 2}, {"dp_outer": 2, "ep": 2}, {"ep": 2, "etp": 2}, {"tp": 2, "etp": 2}, {"etp": 4}],
    5: [{}],
    8: [{"dp_outer": 2, "tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "tp": 2, "etp": 2}],
}


def fitting(degrees: dict[str, int]) -> list[tuple[str, Placement, Axis]]:
    """The splits whose sizes these degrees divide."""
    size = {axis: degrees.get(axis.value, 1) for axis in Axis}
    return [
        (name, placement, axis)
        for name, (placement, axis) in SPLITS.items()
        if all(placement.view_shape[dim] % size[split] == 0 for split, dim in placement.splits)
    ]


def check_round_trips(layouts: list[dict[str, int]]) -> int:
    num_strided = 0
    for degrees in layouts:
        meshes = build_meshes(**degrees)
        # Pieces are moved as they are: one layout says enough of another dtype.
        dtypes = (torch.float32, torch.bfloat16) if degrees is layouts[0] else (torch.float32,)
        for (name, placement, axis), dtype in itertools.product(fitting(degrees), dtypes):
            full = whole_values(placement.global_shape, dtype)
            made = shard(full, placement, meshes, axis)
            even = made.to_dtensor()
            where = f"{name} under {degrees}: {made.placements}"
            assert type(even) is DTensor
            assert not any(isinstance(p, (RaggedShard, _StridedShard)) for p in even.placements)
            assert torch.equal(even.full_tensor(), full), where
            assert torch.equal(made.full_tensor(), full), where
            back = ShardedTensor.from_dtensor(even, made)
            assert back.same_layout(made)
            assert torch.equal(back.piece, made.piece), where
            assert len(made.placements) == made.device_mesh.ndim
            assert isinstance(made.placements[-1], RaggedShard)
            assert made.to_local().data_ptr() == made.piece.data_ptr()
            num_strided += any(isinstance(p, _StridedShard) for p in made.placements)
    return num_strided


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (3, [{}, {"etp": 3}]),
        (4, [{"dp_outer": 2, "ep": 2}, {"tp": 2, "etp": 2}]),
        *(pytest.param(*each, marks=pytest.mark.full) for each in LAYOUTS.items()),
    ],
)
def test_to_dtensor_and_back_is_exact_for_every_kind_of_split(
    world: int, layouts: list[dict[str, int]]
) -> None:
    num_strided = run_ranks(check_round_trips, world, layouts)
    assert all(count > 0 for count in num_strided) == (world != 5)


def check_strided_agrees_with_torch() -> None:
    """What ``placements`` says of gate and up is what torch's own strided placement means."""
    meshes = build_meshes(ep=2, etp=2)
    placement, axis = SPLITS["gate_up"]
    full = whole_values(placement.global_shape)
    made = shard(full, placement, meshes, axis)
    assert made.device_mesh.mesh_dim_names == ("ep", "etp", "edp")
    assert made.placements[:2] == (Shard(0), _StridedShard(1, split_factor=2))
    split = distribute_tensor(full, made.device_mesh, [*made.placements[:2], Replicate()])
    assert torch.equal(split.to_local().flatten(), made.to_local())
    assert torch.equal(ShardedTensor.from_dtensor(split, made).piece, made.piece)


def test_placements_of_gate_and_up_mean_what_torch_means() -> None:
    run_ranks(check_strided_agrees_with_torch, 4)


def check_redistribute() -> None:
    meshes = build_meshes(tp=2)
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = whole_values((5, 12))
    made = shard(full, *SPLITS["columns over tp"][:1], meshes, Axis.FSDP)
    targets = [
        (None, [Replicate(), Replicate()]),
        (None, [Shard(1), Shard(1)]),
        (world, [Shard(-1)]),
        (world, [Replicate()]),
        (square, [Shard(0), Shard(0)]),
        (square, [Shard(1), Replicate()]),
    ]
    for mesh, placements in targets:
        moved = made.redistribute(mesh, placements)
        want = distribute_tensor(full, mesh or made.device_mesh, placements)
        assert torch.equal(moved.to_local(), want.to_local())
        assert torch.equal(moved.full_tensor(), full)
        target = torch.zeros_like(made)
        target.copy_(moved.to(torch.float64))
        assert torch.equal(target.piece, made.piece)
    for placements, error, match in (
        ([Replicate()], ValueError, "expected 2 placements"),
        (None, ValueError, "expected placements"),
        ([Replicate(), Shard(2)], ValueError, "2 dims"),
        ([Replicate(), Partial()], NotImplementedError, "Partial"),
        ([Replicate(), _StridedShard(0, split_factor=2)], NotImplementedError, "StridedShard"),
        (made.placements, NotImplementedError, "another ragged layout"),
    ):
        with pytest.raises(error, match=match):
            made.redistribute(placements=placements)
    partial = DTensor.from_local(full, world, [Partial()], run_check=False)
    with pytest.raises(NotImplementedError, match=r"redistribute\(\) its partial"):
        made.copy_(partial)
    with pytest.raises(ValueError, match=r"expected a DTensor of shape \(5, 12\)"):
        made.copy_(distribute_tensor(full[:4], world, [Shard(0)]))


def test_redistribute_gives_what_torch_would_have_distributed() -> None:
    run_ranks(check_redistribute, 4)


def check_stock_checkpoint_of_gate_and_up(folder: str, phase: str) -> None:
    """A DTensor in even placements is what stock DCP stores right, strided halves included."""
    meshes = build_meshes(**({"etp": 2} if phase == "save" else {}))
    placement, axis = SPLITS["gate_up"]
    full = whole_values(placement.global_shape)
    made = shard(full, placement, meshes, axis)
    if phase == "save":
        dcp.save({"w": made.to_dtensor()}, checkpoint_id=folder)
        return
    empty = torch.zeros_like(made)
    dcp.load({"w": empty}, checkpoint_id=folder)
    assert torch.equal(empty.full_tensor(), full)


def test_stock_checkpoints_store_the_dtensor_of_a_strided_split() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_stock_checkpoint_of_gate_and_up, 4, folder, "save")
        run_ranks(check_stock_checkpoint_of_gate_and_up, 3, folder, "load")


def test_gradients_and_parameters_have_the_same_manners(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)
    try:
        full = torch.arange(12.0).view(3, 4)
        parameter: Any = nn.Parameter(shard(full, Placement.whole((3, 4)), build_meshes(), Axis.FSDP_TP))
        (parameter * 2).backward(torch.ones_like(parameter))
        assert parameter.grad.placements == parameter.placements == (RaggedShard(0, 12),)
        assert parameter.grad.device_mesh == parameter.device_mesh
        assert torch.equal(parameter.grad.to_dtensor().full_tensor(), torch.full((3, 4), 2.0))
        with pytest.raises(NotImplementedError, match="grad_placements"):
            parameter.to_local(grad_placements=[Replicate()])
    finally:
        dist.destroy_process_group()
