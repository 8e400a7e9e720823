"""The layer that a configuration describes, against plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import MoE
from fsdmoe.models import preset_config
from fsdmoe.models.moe import build_moe
from tests.support.hf_pairs import randomize

CONFIG = preset_config("tiny-qwen3", moe_latent_size=12, n_shared_experts=2, shared_expert_gate=True)


def plain(layer: MoE, x_TD: Tensor) -> Tensor:
    """Latent experts and gated shared ones, token by token."""
    width = CONFIG.moe_intermediate_size
    probabilities = (x_TD @ layer.gate.weight.t()).softmax(-1)
    weights_TK, ids_TK = probabilities.topk(CONFIG.num_experts_per_tok)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    rows = []
    for x_D, weights, ids in zip(x_TD, weights_TK, ids_TK, strict=True):
        latent = layer.fc1_latent_proj.weight @ x_D  # type: ignore[union-attr]
        total: Tensor = torch.zeros_like(latent)
        for weight, expert in zip(weights, ids, strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ latent).split(width)
            total = total + weight * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
        shared = layer.shared_expert
        assert shared is not None
        inner = F.silu(shared.gate_proj.weight @ x_D) * (shared.up_proj.weight @ x_D)
        scale = torch.sigmoid(layer.shared_expert_gate.weight @ x_D)  # type: ignore[union-attr]
        rows.append(
            layer.fc2_latent_proj.weight @ total + scale * (shared.down_proj.weight @ inner)  # type: ignore[union-attr]
        )
    return torch.stack(rows)


def test_latent_experts_and_gated_shared_ones_are_plain_torchs() -> None:
    layer = build_moe(CONFIG, ExpertsConfig(compute="sequential"))
    grouped = build_moe(CONFIG, ExpertsConfig())
    randomize(layer, 0.3)
    grouped.load_state_dict(layer.state_dict())
    x_TD = torch.randn(6, CONFIG.hidden_size)
    wanted = plain(layer, x_TD)
    gradients = torch.autograd.grad(wanted.square().sum(), list(layer.parameters()))
    for ours in (layer, grouped):
        y_TD, _ = ours(x_TD)
        torch.testing.assert_close(y_TD, wanted, rtol=1e-5, atol=1e-5)
        y_TD.square().sum().backward()
        for (name, parameter), gradient in zip(ours.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4, msg=name)
