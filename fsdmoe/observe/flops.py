"""Model FLOPs: the arithmetic that the model itself needs, whatever the implementation repeats or wastes.

Counted per token, for one forward pass; a multiply and an add are two.

    2 x active matrix parameters            every matrix a token is multiplied with: attention projections,
    router,
                                            its top-k experts, shared experts, dense MLPs, head (the embedding
                                            is a lookup)
    + 2 x heads x (qk_dim + v_dim) x pairs  scores and their product with the values; ``pairs`` is the mean
                                            number of positions that a token sees under a causal mask,
                                            (seq_len + 1) / 2, fewer where a layer has a window; once a
                                            layer

A training step costs three times that: the backward pass computes one product for the input and one for the
weight of each forward product. Recomputed activations, padding, norms, rotary embeddings and softmax are not
counted, so a figure here divided by time is comparable between implementations. A sequence is counted as one
document: when short documents are packed, the true attention part is smaller.
"""

from dataclasses import dataclass, fields

MATRICES_PER_MLP = 3  # gate, up and down
BACKWARD_AND_FORWARD = 3


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Dimensions of multi-head latent attention (DeepSeek-V2/V3)."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries are projected in one go."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide a decoder's FLOPs. Layers that are not dense are MoE layers."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    seq_len: int
    num_experts: int = 0
    """0: no MoE layers at all."""
    top_k: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of all shared experts of a layer together."""
    moe_latent_size: int = 0
    """Width of the routed experts' inputs, between two projections; 0: ``hidden_size``, without them."""
    num_dense_layers: int = 0
    """How many of ``num_layers`` have a dense MLP (without experts: all of them, whatever stands here)."""
    dense_intermediate_size: int = 0
    mla: MLAShape | None = None
    """Given: attention is MLA, and ``num_kv_heads`` and ``head_dim`` are not used."""
    window: int | None = None
    """How many positions a token sees at most in layers that have a window."""
    num_window_layers: int = 0
    num_mtp_layers: int = 0
    """Multi-token-prediction depths: each a projection from twice the width, one more layer of the kind that
    the model ends with, and one more pass through the head."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"ModelShape.{field.name}: expected 0 or more, got {value}")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"ModelShape.num_dense_layers: expected at most num_layers = {self.num_layers}, "
                f"got {self.num_dense_layers}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"ModelShape.top_k: expected at most num_experts = {self.num_experts}, got {self.top_k}"
            )

    @property
    def expert_hidden_size(self) -> int:
        """Width of what a routed expert is given."""
        return self.moe_latent_size or self.hidden_size

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0


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


def forward_flops_per_token(shape: ModelShape) -> FlopsPerToken:
    """Model FLOPs of one token in one forward pass (see the module's formula)."""
    moe_layers, dense_layers = shape.num_moe_layers, shape.num_layers - shape.num_moe_layers
    if moe_layers:
        moe_layers += shape.num_mtp_layers
    else:
        dense_layers += shape.num_mtp_layers
    layers = moe_layers + dense_layers
    mlp = 2 * MATRICES_PER_MLP * shape.hidden_size
    routed = 2 * MATRICES_PER_MLP * shape.expert_hidden_size * shape.moe_intermediate_size * shape.top_k
    latent = 4 * shape.hidden_size * shape.moe_latent_size  # down and up
    return FlopsPerToken(
        projections=layers * 2.0 * _projection_params(shape),
        attention=(layers - shape.num_window_layers) * _attention_flops(shape, None)
        + shape.num_window_layers * _attention_flops(shape, shape.window),
        dense_mlp=dense_layers * float(mlp * shape.dense_intermediate_size),
        router=moe_layers * 2.0 * shape.hidden_size * shape.num_experts,
        experts=moe_layers * float(routed + latent),
        shared_experts=moe_layers * float(mlp * shape.shared_intermediate_size),
        mtp_projections=shape.num_mtp_layers * 2.0 * (2 * shape.hidden_size) * shape.hidden_size,
        head=(1 + shape.num_mtp_layers) * 2.0 * shape.hidden_size * shape.vocab_size,
    )


def training_flops_per_token(shape: ModelShape) -> float:
    """Model FLOPs of one token in training: forward and backward."""
    return BACKWARD_AND_FORWARD * forward_flops_per_token(shape).total


def active_matrix_params(shape: ModelShape) -> int:
    """Parameters of all matrices that one token is multiplied with (a head passed twice counts twice)."""
    flops = forward_flops_per_token(shape)
    return round((flops.total - flops.attention) / 2)


def idle_expert_params(shape: ModelShape) -> int:
    """Parameters of the experts that a token does not visit: all others are active."""
    layers = shape.num_moe_layers + (shape.num_mtp_layers if shape.num_moe_layers else 0)
    width = MATRICES_PER_MLP * shape.expert_hidden_size * shape.moe_intermediate_size
    return layers * (shape.num_experts - shape.top_k) * width


def _projection_params(shape: ModelShape) -> int:
    hidden, heads, mla = shape.hidden_size, shape.num_heads, shape.mla
    if mla is None:
        return 2 * hidden * shape.head_dim * (heads + shape.num_kv_heads)
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.q_lora_rank is None:
        query = hidden * heads * qk_dim
    else:
        query = mla.q_lora_rank * (hidden + heads * qk_dim)
    key_value = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    key_value += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + key_value + heads * mla.v_head_dim * hidden


def _attention_flops(shape: ModelShape, window: int | None) -> float:
    if shape.mla is None:
        dims = 2 * shape.head_dim
    else:
        dims = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim + shape.mla.v_head_dim
    seen = min(shape.seq_len, window or shape.seq_len)
    pairs = seen * (seen + 1) / 2 + (shape.seq_len - seen) * seen
    return 2.0 * shape.num_heads * dims * pairs / max(shape.seq_len, 1)
