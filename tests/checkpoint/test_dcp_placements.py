"""Strided splits before a stock save: plain ones, with the same values."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe import checkpoint
from fsdmoe.checkpoint import from_dcp, plain_placements
from fsdmoe.testing import run_ranks


def weights() -> torch.Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(2))


def save_strided(folder: str) -> bool:
    """A fused gate and up of which every rank has rows of both, and an FSDP2 + TP weight; saved plainly."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    rows = weights().view(2, 4, 2, 3)[:, rank].reshape(4, 3)
    fused = DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(3, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(weights())
    parallelize_module(linear, both["tp"], ColwiseParallel())
    fully_shard(linear, mesh=both["dp"])
    state = {"model": {"lm_head.weight": linear.weight.detach(), "model.layers.0.mlp.gate_up": fused}}
    plain = plain_placements({**state, "values": [1, "a", (2, None)]})
    assert plain["values"] == [1, "a", (2, None)]
    dcp.save({"model": plain["model"]}, checkpoint_id=folder)
    return any(isinstance(p, _StridedShard) for t in plain["model"].values() for p in t.placements)


def test_strided_splits_are_saved_as_what_they_are(tmp_path: Path) -> None:
    assert run_ranks(save_strided, 4, str(tmp_path / "stock")) == [False] * 4
    from_dcp(tmp_path / "stock", tmp_path / "ours")
    found = {name: torch.zeros(16, 3) for name in ("lm_head.weight", "model.layers.0.mlp.gate_up")}
    checkpoint.load(tmp_path / "ours", found)  # type: ignore[arg-type]
    for name, value in found.items():
        assert torch.equal(value, weights()), name
