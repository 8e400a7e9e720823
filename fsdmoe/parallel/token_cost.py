"""What a token costs in a model that is built: parameters that it visits, and model FLOPs.

    forward    2 x every matrix that it is multiplied with, of experts those of its top k; and attention
    backward   the same again for inputs, and once more for the matrices that are trained

Frozen weights have no gradients. Of a wrapped model the matrices are those of its modules, whatever its
configuration calls them; embeddings are looked up, and experts of a form that is not known count whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.huggingface.limits import text_config
from fsdmoe.huggingface.lora import FACTORS, path_around
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of, top_k_of
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.decoder import Decoder
from fsdmoe.models.flops import attention_flops, forward_flops_per_token, idle_expert_params

_WITHOUT_SCORES = ("linear", "conv", "mamba", "recurrent", "moe", "mlp")
"""In the names of kinds of layers that attend to no other tokens by scores."""


class TokenCost(NamedTuple):
    """Of one token."""

    active_params: int
    """All parameters but those of experts that it does not visit."""
    forward_flops: float
    training_flops: float
    """Forward and backward."""


class _Matrix(NamedTuple):
    num_elements: int
    share: float
    """Of them that a token is multiplied with."""
    is_trained: bool


def token_cost(model: nn.Module, config: ModelConfig, seq_len: int) -> TokenCost:
    """Of a model whose experts are split, in rows of ``seq_len`` tokens of one document."""
    matrices = list(_matrices(model, config))
    visited = sum(each.num_elements * each.share for each in matrices)
    frozen = sum(each.num_elements * each.share for each in matrices if not each.is_trained)
    if isinstance(model, Decoder):
        idle = idle_expert_params(config)
        forward = forward_flops_per_token(config, seq_len).total
    else:
        idle = round(sum(each.num_elements for each in matrices) - visited)
        forward = 2 * visited + _attention_flops(text_config(getattr(model, "config", None)), config, seq_len)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return TokenCost(num_params - idle, forward, 3 * forward - 2 * frozen)


def _matrices(model: nn.Module, config: ModelConfig) -> Iterator[_Matrix]:
    """Each as often as a module has it: a head that is the embedding is multiplied with."""
    shares, of_factors = _expert_shares(model, config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        is_factor = not set(FACTORS).isdisjoint(name.split("."))
        share = next((s for path, s in of_factors.items() if is_factor and name.startswith(path)), 1.0)
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not own.endswith("bias"):
                part = shares.get(f"{name}.{own}", share)
                yield _Matrix(parameter.numel(), part, parameter.requires_grad)


def _expert_shares(model: nn.Module, config: ModelConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Of all experts of a layer, the share that a token visits: by parameter, and by the path of adapters
    around them."""
    of_weights: dict[str, float] = {}
    of_factors: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            share = config.num_experts_per_tok / config.num_experts
            of_weights |= dict.fromkeys((f"{name}.gate_up_proj", f"{name}.down_proj"), share)
        elif (forward := parallel_forward_of(module)) is not None:
            spec = forward.spec
            choices = spec.num_experts + spec.num_identity
            share = top_k_of(model, path_around(name)) / choices
            of_weights |= {f"{name}.{each}": share for each in (spec.up, spec.down) if each is not None}
            of_weights[f"{name}.{spec.gate_up}"] = share * spec.num_experts / choices  # the others are unused
            of_factors[f"{path_around(name)}."] = share
    return of_weights, of_factors


def _attention_flops(hf: Any, config: ModelConfig, seq_len: int) -> float:
    """Forward, of all layers of a wrapped model."""
    window, chunk = (getattr(hf, key, None) for key in ("sliding_window", "attention_chunk_size"))
    usual = "full_attention" if window is None else "sliding_attention"
    total = 0.0
    for kind in getattr(hf, "layer_types", None) or [usual] * config.num_hidden_layers:
        if any(word in kind for word in _WITHOUT_SCORES):
            continue
        length = min(seq_len, chunk or seq_len) if "chunked" in kind else seq_len
        total += attention_flops(config, length, window if "sliding" in kind else None)
    return total
