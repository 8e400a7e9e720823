"""Training with stock FSDP2 and saving with stock torch.distributed.checkpoint, beside the same in fsdmoe."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdmoe import checkpoint
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.models import build_model
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from tests.support.hf_pairs import hf_model, tiny

ROWS = 4
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.97), "eps": 1e-7}


def rows_of(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    """This rank's rows of a global batch that is the same for any number of ranks."""
    rows = torch.randint(0, 96, (ROWS, 13), generator=torch.Generator().manual_seed(100 + step))
    share = ROWS // num_ranks
    return rows[rank * share : (rank + 1) * share]


def fsdp2(architecture: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A transformers model, every layer sharded, with matrices decayed and all else not."""
    model = hf_model(tiny(architecture))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, **SETTINGS)


def fsdp2_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    rows = rows_of(step, dist.get_rank(), dist.get_world_size())
    logits = model(rows[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean(loss)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_fsdp2(
    architecture: str, folder: str, first: int, last: int, saved_after: int, flat: bool
) -> list[float]:
    """Losses of steps ``first`` to ``last``; what is not a start is loaded from ``folder``."""
    model, optimizer = fsdp2(architecture)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    if first:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))
        state["step"] = 0
        dcp.load(state, checkpoint_id=folder)
        assert state["step"] == first
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )
    losses = []
    for step in range(first, last):
        losses.append(fsdp2_step(model, optimizer, step))
        if step + 1 == saved_after:
            weights, state = get_state_dict(model, optimizer, options=options)
            dcp.save({"model": weights, "optim": state, "step": saved_after}, checkpoint_id=folder)
    return losses


def train_fsdmoe(
    architecture: str, degrees: dict[str, int], load: str, last: int, save: str = ""
) -> tuple[int, list[float]]:
    """The step that a checkpoint was of, and the losses from there on."""
    meshes = build_meshes(**degrees)
    policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"))
    model = parallelize(build_model(tiny(architecture)), meshes, policy)
    optimizer = AdamW(model, weight_decay=0.1, **{**SETTINGS, "lr": 1.0})
    values = checkpoint.load(load, model, optimizer, step=0)
    assert [group["lr"] for group in optimizer.param_groups] == [SETTINGS["lr"]] * 2
    losses = []
    for step in range(values["step"], last):
        rows = rows_of(step, meshes.rank(Axis.BATCH), meshes.size(Axis.BATCH))
        out = model(rows[:, :-1], labels_BS=rows[:, 1:])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(out.cross_entropy))
    if save:
        checkpoint.save(save, model, optimizer, meshes=meshes, step=last)
    return values["step"], losses
