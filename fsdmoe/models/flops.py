"""Model FLOPs: the arithmetic that the model itself needs, whatever the implementation repeats or wastes.

Counted per token, for one forward pass; a multiply and an add are two.

    2 x active matrix parameters            every matrix a token is multiplied with: attention projections,
                                            router, its top-k experts, shared experts, dense MLPs, head (the
                                            embedding is a lookup)
    + 2 x heads x (qk_dim + v_dim) x pairs  scores and their product with the values; ``pairs`` is the mean
                                            number of positions that a token sees under a causal mask,
                                            (seq_len + 1) / 2, fewer where a layer has a window; once a
                                            layer

A training step costs three times that: the backward pass computes one product for the input and one for the
weight of each forward product. Recomputed activations, padding, norms, rotary embeddings and softmax are not
counted, so a figure here divided by time is comparable between implementations. A sequence is counted as one
document: when short documents are packed, the true attention part is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fsdmoe.models.config import ModelConfig

MATRICES_PER_MLP = 3  # gate, up and down
BACKWARD_AND_FORWARD = 3


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Forward FLOPs of one token, by part of the model."""

    projections: float
    attention: float
    dense_mlp: float
    router: float
    experts: float
    shared_experts: float
    mtp_projections: float
    head: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> FlopsPerToken:
    """Model FLOPs of one token in one forward pass over rows of ``seq_len`` (see the module's formula)."""
    hidden, depths, windows = model.hidden_size, model.num_nextn_predict_layers, model.num_window_layers
    moe_layers = _num_moe_layers(model)
    layers = model.num_hidden_layers + depths
    mlp = 2 * MATRICES_PER_MLP * hidden
    latent = model.moe_latent_size or 0
    routed = 2 * MATRICES_PER_MLP * (latent or hidden) * model.moe_intermediate_size
    shared = model.n_shared_experts * model.moe_intermediate_size
    return FlopsPerToken(
        projections=layers * 2.0 * _projection_params(model),
        attention=(layers - windows) * attention_flops(model, seq_len, None)
        + windows * attention_flops(model, seq_len, model.sliding_window),
        dense_mlp=(layers - moe_layers) * float(mlp * model.intermediate_size),
        router=moe_layers * 2.0 * hidden * model.num_experts,
        experts=moe_layers * float(routed * model.num_experts_per_tok + 4 * hidden * latent),
        shared_experts=moe_layers * float(mlp * shared),
        mtp_projections=depths * 2.0 * (2 * hidden) * hidden,
        head=(1 + depths) * 2.0 * hidden * model.vocab_size,
    )


def training_flops_per_token(model: ModelConfig, seq_len: int, *, frozen: bool = False) -> float:
    """Model FLOPs of one token in training: forward and backward. ``frozen``: matrices have no gradients."""
    forward = forward_flops_per_token(model, seq_len)
    spared = forward.total - forward.attention if frozen else 0.0
    return BACKWARD_AND_FORWARD * forward.total - spared


def num_parameters(model: ModelConfig) -> int:
    """Of all matrices; norms and biases aside."""
    each = forward_flops_per_token(model, 1)
    embedding = 0 if model.tie_word_embeddings else model.hidden_size * model.vocab_size
    repeated = model.num_nextn_predict_layers * 2.0 * model.hidden_size * model.vocab_size  # heads that share
    return int((each.total - each.attention - repeated) / 2) + idle_expert_params(model) + embedding


def idle_expert_params(model: ModelConfig) -> int:
    """Parameters of the experts that a token does not visit: all others are active."""
    width = MATRICES_PER_MLP * (model.moe_latent_size or model.hidden_size) * model.moe_intermediate_size
    return _num_moe_layers(model) * (model.num_experts - model.num_experts_per_tok) * width


def _num_moe_layers(model: ModelConfig) -> int:
    """With prediction depths, which are layers of the kind that the model ends with."""
    return model.num_moe_layers + model.num_nextn_predict_layers if model.num_moe_layers else 0


def _projection_params(model: ModelConfig) -> int:
    hidden = model.hidden_size
    heads = model.num_attention_heads
    if not model.is_mla:
        return 2 * hidden * model.head_dim * (heads + model.num_key_value_heads)
    qk_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.q_lora_rank is None:
        query = hidden * heads * qk_dim
    else:
        query = model.q_lora_rank * (hidden + heads * qk_dim)
    key_value = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    key_value += model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return query + key_value + heads * model.v_head_dim * hidden


def attention_flops(model: ModelConfig, seq_len: int, window: int | None) -> float:
    """Forward FLOPs of a token in the attention of one layer, its projections aside."""
    dims = 2 * model.head_dim
    if model.is_mla:
        dims = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    seen = min(seq_len, window or seq_len)
    pairs = seen * (seen + 1) / 2 + (seq_len - seen) * seen
    return 2.0 * model.num_attention_heads * dims * pairs / max(seq_len, 1)
