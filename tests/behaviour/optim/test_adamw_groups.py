"""Optimizer groups are the same on every rank, whatever pieces a rank happens to hold."""

from typing import Any

import torch
from torch import nn

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks


def _step_with_a_vector_on_one_rank_only(trains_matrices: bool) -> tuple[list[int], list[Any], torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64, bias=False))
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
    model[0].weight.requires_grad_(trains_matrices)
    policy = FSDPPolicy(
        fsdp=FSDPConfig(granule="tensor"), precision=PrecisionConfig(param_dtype="float32"), grad_divisor=1.0
    )
    fully_shard(model, build_meshes(), policy)
    optimizer = AdamW(model, lr=0.1)
    model(torch.arange(64.0).sin().expand(2, 64)).pow(3).sum().backward()
    optimizer.step()
    state = optimizer.checkpoint_state()
    held = [sum(p.piece.numel() > 0 for p in group["params"]) for group in optimizer.param_groups]
    return held, state["groups"], dict(model.named_parameters())["1.weight"].full_tensor().detach()


def test_a_rank_without_a_decayed_or_an_undecayed_piece_has_both_groups() -> None:
    for trains_matrices in (True, False):
        results = run_ranks(_step_with_a_vector_on_one_rank_only, 4, trains_matrices)
        assert any(0 in held for held, _, _ in results), "some rank holds nothing of one group"
        assert all(groups == results[0][1] for _, groups, _ in results)
        assert [group["name"] for group in results[0][1]] == ["decayed", "not decayed"]
        weights = [weight for _, _, weight in results]
        assert not torch.equal(weights[0], torch.ones(64)), "the vector was stepped"
        assert all(torch.equal(weight, weights[0]) for weight in weights)
