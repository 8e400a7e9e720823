"""States for checkpoint tests: every kind of placement, cut raggedly, from values that any layout can
compute."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, halves
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, Meshes

PLACEMENTS: dict[str, tuple[Placement, Axis]] = {
    "embed_tokens.weight": (Placement.whole((23, 8)), Axis.FSDP_TP),
    "norm.weight": (Placement.whole((8,)), Axis.FSDP_TP),
    "scale": (Placement.whole(()), Axis.FSDP_TP),
    "nothing": (Placement.whole((0, 3)), Axis.FSDP_TP),
    "q_proj.weight": (Placement((16, 8), ((Axis.TP, Shard(0)),)), Axis.FSDP),
    "o_proj.weight": (Placement((8, 16), ((Axis.TP, Shard(1)),)), Axis.FSDP),
    "gate_up_proj": (Placement((8, 8, 6), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1)))), Axis.EDP),
    "down_proj": (Placement((8, 6, 4), ((Axis.EP, Shard(0)), (Axis.ETP, Shard(2)))), Axis.EDP),
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp3": (3, {}),
    "fsdp2 ep2": (2, {"ep": 2}),
    "hsdp 2x2 ep2": (4, {"dp_outer": 2, "ep": 2}),
    "fsdp4 ep4": (4, {"ep": 4}),
    "fsdp4 ep2": (4, {"ep": 2}),
    "tp2 etp2": (4, {"tp": 2, "etp": 2}),
    "cp2 tp2 ep2 etp2": (8, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}),
    "hsdp2 ep4": (8, {"dp_outer": 2, "ep": 4}),
    "ep8": (8, {"ep": 8}),
    "tp4 ep2": (8, {"tp": 4, "ep": 2}),
}


def truth(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of the tensor of this name, the same on every rank of every layout."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def cut(placement: Placement, meshes: Meshes, axis: Axis, seed: str) -> tuple[int, int]:
    """This rank's range of the local tensor: the same random cuts everywhere; with three ranks one holds
    nothing."""
    numel, count = math.prod(placement.local_shape(meshes)), meshes.size(axis)
    cuts = sorted(random.Random(f"{seed} {count}").randint(0, numel) for _ in range(count - 1))
    if count >= 3:
        cuts[0] = 0
    bounds = [0, *cuts, numel]
    return bounds[meshes.rank(axis)], bounds[meshes.rank(axis) + 1]


def sharded(
    name: str, meshes: Meshes, *, dtype: torch.dtype = torch.float32, filled: bool = True, key: str = ""
) -> ShardedTensor:
    placement, axis = PLACEMENTS[name]
    start, end = cut(placement, meshes, axis, name)
    buffer = torch.full((end - start + 5,), -7.0).to(dtype)
    made = ShardedTensor(buffer[2 : 2 + end - start], placement, start, end, meshes, axis)
    if filled:
        made.copy_(truth(key + name, placement.global_shape, dtype))
    return made


def whole_state(
    meshes: Meshes, *, filled: bool = True, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """A model in bf16 with fp32 moments, a plain tensor, and values."""
    model = {name: sharded(name, meshes, dtype=dtype, filled=filled) for name in PLACEMENTS}
    moments = {
        name: {key: sharded(name, meshes, filled=filled, key=key) for key in ("exp_avg", "exp_avg_sq")}
        for name in PLACEMENTS
    }
    bias = truth("bias", (8,)) if filled else torch.zeros(8)
    return {
        "model": {**model, "router_bias": bias},
        "optimizer": {"state": moments, "steps": 12 if filled else 0},
        "rng": torch.arange(16, dtype=torch.uint8) if filled else torch.zeros(16, dtype=torch.uint8),
        "data": {"position": [3, 4], "name": "corpus"} if filled else {},
        "step": 12 if filled else 0,
    }


def assert_same(state: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Every element that this rank holds is what :func:`truth` says, bit for bit."""
    for name in PLACEMENTS:
        _check(state["model"][name], truth(name, PLACEMENTS[name][0].global_shape, dtype), name)
        for key in ("exp_avg", "exp_avg_sq"):
            want = truth(key + name, PLACEMENTS[name][0].global_shape)
            _check(state["optimizer"]["state"][name][key], want, f"{key} of {name}")
    assert torch.equal(state["model"]["router_bias"], truth("bias", (8,)))
    assert torch.equal(state["rng"], torch.arange(16, dtype=torch.uint8))
    assert state["data"] == {"position": [3, 4], "name": "corpus"}
    assert state["step"] == 12
    assert state["optimizer"]["steps"] == 12


def _check(held: ShardedTensor, full: torch.Tensor, name: str) -> None:
    for box in held.boxes:
        assert torch.equal(box.view_of(held.piece), box.slice_of(full)), (name, box)
