"""The formula against FLOPs counted by torch on a small decoder written out by hand, forward and backward.

Legend: S positions, H hidden, A heads, D head dim, V vocabulary, E experts.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fsdmoe.observe.flops import (
    MLAShape,
    ModelShape,
    active_matrix_params,
    forward_flops_per_token,
    training_flops_per_token,
)

GQA = ModelShape(
    hidden_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5, vocab_size=17, seq_len=7,
    num_experts=6, top_k=2, moe_intermediate_size=9,
)  # fmt: skip
MLA = MLAShape(kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4, q_lora_rank=5)
DENSE_FIRST = replace(GQA, num_dense_layers=1, dense_intermediate_size=20, shared_intermediate_size=8)
SHAPES = {
    "gqa": GQA,
    "windows": replace(GQA, seq_len=8, window=3, num_window_layers=2),
    "dense_first_and_shared": DENSE_FIRST,
    "mla": replace(DENSE_FIRST, mla=MLA),
    "mla_without_query_rank": replace(GQA, mla=replace(MLA, q_lora_rank=None)),
    "mtp": replace(DENSE_FIRST, num_mtp_layers=2),
    "no_experts": replace(GQA, num_experts=0, top_k=0, dense_intermediate_size=11, num_mtp_layers=1),
}


def weight(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) / rows**0.5).requires_grad_()


def causal_attention(
    q_SAD: torch.Tensor, k_SAD: torch.Tensor, v_SAD: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Each position against itself and those before it only, so that not one masked pair is computed."""
    rows = []
    for head in range(q_SAD.shape[1]):
        for position in range(q_SAD.shape[0]):
            seen = slice(max(0, position + 1 - (window or position + 1)), position + 1)
            scores = q_SAD[position : position + 1, head] @ k_SAD[seen, head].T
            rows.append(scores.softmax(-1) @ v_SAD[seen, head])
    return torch.cat(rows).view(q_SAD.shape[1], q_SAD.shape[0], -1).transpose(0, 1).flatten(1)


def gqa_attention(x_SH: torch.Tensor, shape: ModelShape, window: int | None = None) -> torch.Tensor:
    heads, kv_heads, dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size
    q_SAD = (x_SH @ weight(hidden, heads * dim)).view(-1, heads, dim)
    k_SAD = (x_SH @ weight(hidden, kv_heads * dim)).view(-1, kv_heads, dim)
    v_SAD = (x_SH @ weight(hidden, kv_heads * dim)).view(-1, kv_heads, dim)
    k_SAD, v_SAD = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k_SAD, v_SAD))
    return causal_attention(q_SAD, k_SAD, v_SAD, window) @ weight(heads * dim, hidden)


def mla_attention(x_SH: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    mla, heads, hidden = shape.mla, shape.num_heads, shape.hidden_size
    nope, rope, v_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
    query, query_width = x_SH, hidden
    if mla.q_lora_rank is not None:
        query, query_width = x_SH @ weight(hidden, mla.q_lora_rank), mla.q_lora_rank
    q_SAD = (query @ weight(query_width, heads * (nope + rope))).view(-1, heads, nope + rope)
    latent, k_rope = (x_SH @ weight(hidden, mla.kv_lora_rank + rope)).split([mla.kv_lora_rank, rope], dim=-1)
    expanded = (latent @ weight(mla.kv_lora_rank, heads * (nope + v_dim))).view(-1, heads, nope + v_dim)
    k_nope, v_SAD = expanded.split([nope, v_dim], dim=-1)
    k_SAD = torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], dim=-1)
    return causal_attention(q_SAD, k_SAD, v_SAD) @ weight(heads * v_dim, hidden)


def mlp(x_SH: torch.Tensor, width: int) -> torch.Tensor:
    hidden = x_SH.shape[1]
    return (F.silu(x_SH @ weight(hidden, width)) * (x_SH @ weight(hidden, width))) @ weight(width, hidden)


def moe(x_SH: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    weights, ids = (x_SH @ weight(shape.hidden_size, shape.num_experts)).softmax(-1).topk(shape.top_k)
    out = torch.zeros_like(x_SH)
    for expert in range(shape.num_experts):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        out = out.index_add(
            0, rows, mlp(x_SH[rows], shape.moe_intermediate_size) * weights[rows, choice, None]
        )
    return out + mlp(x_SH, shape.shared_intermediate_size) if shape.shared_intermediate_size else out


def layer(x_SH: torch.Tensor, shape: ModelShape, *, dense: bool, window: int | None = None) -> torch.Tensor:
    attended = gqa_attention(x_SH, shape, window) if shape.mla is None else mla_attention(x_SH, shape)
    x_SH = x_SH + attended
    return x_SH + (mlp(x_SH, shape.dense_intermediate_size) if dense else moe(x_SH, shape))


def counted_flops(shape: ModelShape, *, backward: bool) -> int:
    torch.manual_seed(0)
    tokens = torch.arange(shape.seq_len) % shape.vocab_size
    embedding = weight(shape.vocab_size, shape.hidden_size)
    no_experts = shape.num_experts == 0
    with FlopCounterMode(display=False) as counter:
        x_SH = F.embedding(tokens, embedding)
        for index in range(shape.num_layers):
            window = shape.window if index < shape.num_window_layers else None
            x_SH = layer(x_SH, shape, dense=no_experts or index < shape.num_dense_layers, window=window)
        head = weight(shape.hidden_size, shape.vocab_size)
        loss = F.cross_entropy(x_SH @ head, tokens)
        for _ in range(shape.num_mtp_layers):
            both = torch.cat([x_SH, F.embedding(tokens, embedding)], dim=-1)
            x_SH = layer(both @ weight(2 * shape.hidden_size, shape.hidden_size), shape, dense=no_experts)
            loss = loss + F.cross_entropy(x_SH @ head, tokens)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_equals_what_torch_counts_forward_and_in_training(name):
    shape = SHAPES[name]
    assert forward_flops_per_token(shape).total * shape.seq_len == counted_flops(shape, backward=False)
    assert training_flops_per_token(shape) * shape.seq_len == counted_flops(shape, backward=True)


def test_a_slice_of_qwen3_30b_a3b_costs_its_published_flops():
    """8 of its 48 layers at 4,096 tokens: 766 M active matrix parameters, 5.4 GFLOP a token in training."""
    shape = ModelShape(
        hidden_size=2048, num_layers=8, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936,
        seq_len=4096, num_experts=128, top_k=8, moe_intermediate_size=768,
    )  # fmt: skip
    per_layer = 2048 * 128 * (32 + 4 + 4 + 32) + 2048 * 128 + 8 * 3 * 2048 * 768
    assert active_matrix_params(shape) == 8 * per_layer + 2048 * 151936
    assert training_flops_per_token(shape) == pytest.approx(5.40e9, rel=2e-3)


def test_experts_beyond_the_top_k_cost_only_their_router_column():
    more = replace(GQA, num_experts=60)
    extra = forward_flops_per_token(more).total - forward_flops_per_token(GQA).total
    assert extra == GQA.num_layers * 2 * GQA.hidden_size * (60 - 6)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"num_dense_layers": 4}, "num_dense_layers"), ({"top_k": 7}, "top_k"), ({"seq_len": -1}, "seq_len")],
)
def test_an_impossible_shape_is_refused(change, named):
    with pytest.raises(ValueError, match=f"ModelShape.{named}: expected"):
        replace(GQA, **change)
