"""The formula against FLOPs counted by torch on a small decoder written out by hand, forward and backward.

Legend: S positions, H hidden, A heads, D head dim, V vocabulary, E experts.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fsdmoe.models.config import ModelConfig, preset_config
from fsdmoe.models.flops import forward_flops_per_token, training_flops_per_token

LENGTH = 8
GQA = ModelConfig(
    hidden_size=12, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    vocab_size=17, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=9,
)  # fmt: skip
DENSE_FIRST = replace(GQA, first_k_dense_replace=1, intermediate_size=20, n_shared_experts=2)
MLA = {
    "architecture": "deepseek_v3", "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}  # fmt: skip
SHAPES = {
    "gqa": GQA,
    "windows": replace(GQA, architecture="gpt_oss", sliding_window=3),
    "dense_first_and_shared": DENSE_FIRST,
    "mla": replace(DENSE_FIRST, **MLA, q_lora_rank=5),
    "mla_without_query_rank": replace(GQA, **MLA),
    "mtp": replace(DENSE_FIRST, num_nextn_predict_layers=2),
    "no_experts": replace(GQA, first_k_dense_replace=3, intermediate_size=11, num_nextn_predict_layers=1),
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


def gqa_attention(x_SH: torch.Tensor, shape: ModelConfig, window: int | None = None) -> torch.Tensor:
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    dim, hidden = shape.head_dim, shape.hidden_size
    q_SAD = (x_SH @ weight(hidden, heads * dim)).view(-1, heads, dim)
    k_SAD = (x_SH @ weight(hidden, kv_heads * dim)).view(-1, kv_heads, dim)
    v_SAD = (x_SH @ weight(hidden, kv_heads * dim)).view(-1, kv_heads, dim)
    k_SAD, v_SAD = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k_SAD, v_SAD))
    return causal_attention(q_SAD, k_SAD, v_SAD, window) @ weight(heads * dim, hidden)


def mla_attention(x_SH: torch.Tensor, shape: ModelConfig) -> torch.Tensor:
    heads, hidden, rank = shape.num_attention_heads, shape.hidden_size, shape.kv_lora_rank
    nope, rope, v_dim = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
    query, query_width = x_SH, hidden
    if shape.q_lora_rank is not None:
        query, query_width = x_SH @ weight(hidden, shape.q_lora_rank), shape.q_lora_rank
    q_SAD = (query @ weight(query_width, heads * (nope + rope))).view(-1, heads, nope + rope)
    latent, k_rope = (x_SH @ weight(hidden, rank + rope)).split([rank, rope], dim=-1)
    expanded = (latent @ weight(rank, heads * (nope + v_dim))).view(-1, heads, nope + v_dim)
    k_nope, v_SAD = expanded.split([nope, v_dim], dim=-1)
    k_SAD = torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], dim=-1)
    return causal_attention(q_SAD, k_SAD, v_SAD) @ weight(heads * v_dim, hidden)


def mlp(x_SH: torch.Tensor, width: int) -> torch.Tensor:
    hidden = x_SH.shape[1]
    return (F.silu(x_SH @ weight(hidden, width)) * (x_SH @ weight(hidden, width))) @ weight(width, hidden)


def moe(x_SH: torch.Tensor, shape: ModelConfig) -> torch.Tensor:
    weights, ids = (
        (x_SH @ weight(shape.hidden_size, shape.num_experts)).softmax(-1).topk(shape.num_experts_per_tok)
    )
    out = torch.zeros_like(x_SH)
    for expert in range(shape.num_experts):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        out = out.index_add(
            0, rows, mlp(x_SH[rows], shape.moe_intermediate_size) * weights[rows, choice, None]
        )
    width = shape.n_shared_experts * shape.moe_intermediate_size
    return out + mlp(x_SH, width) if width else out


def layer(x_SH: torch.Tensor, shape: ModelConfig, *, dense: bool, window: int | None = None) -> torch.Tensor:
    attended = gqa_attention(x_SH, shape, window) if not shape.is_mla else mla_attention(x_SH, shape)
    x_SH = x_SH + attended
    return x_SH + (mlp(x_SH, shape.intermediate_size) if dense else moe(x_SH, shape))


def counted_flops(shape: ModelConfig, *, backward: bool) -> int:
    torch.manual_seed(0)
    tokens = torch.arange(LENGTH) % shape.vocab_size
    embedding = weight(shape.vocab_size, shape.hidden_size)
    no_experts = shape.num_moe_layers == 0
    with FlopCounterMode(display=False) as counter:
        x_SH = F.embedding(tokens, embedding)
        for index in range(shape.num_hidden_layers):
            dense = index < shape.first_k_dense_replace
            x_SH = layer(x_SH, shape, dense=dense, window=shape.window_of(index))
        head = weight(shape.hidden_size, shape.vocab_size)
        loss = F.cross_entropy(x_SH @ head, tokens)
        for _ in range(shape.num_nextn_predict_layers):
            both = torch.cat([x_SH, F.embedding(tokens, embedding)], dim=-1)
            x_SH = layer(both @ weight(2 * shape.hidden_size, shape.hidden_size), shape, dense=no_experts)
            loss = loss + F.cross_entropy(x_SH @ head, tokens)
        if backward:
            loss.backward()
    return counter.get_total_flops()


# What these have, others have too.
IN_FULL = ("gqa", "dense_first_and_shared")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in SHAPES]
)
def test_the_formula_equals_what_torch_counts_forward_and_in_training(name):
    shape = SHAPES[name]
    forward = forward_flops_per_token(shape, LENGTH).total
    assert forward * LENGTH == counted_flops(shape, backward=False)
    assert training_flops_per_token(shape, LENGTH) * LENGTH == counted_flops(shape, backward=True)


def test_a_slice_of_qwen3_30b_a3b_costs_its_published_flops():
    """8 of its 48 layers at 4,096 tokens: 766 M active matrix parameters, 5.4 GFLOP a token in training."""
    shape = preset_config("qwen3-30b-a3b", num_hidden_layers=8)
    per_layer = 2048 * 128 * (32 + 4 + 4 + 32) + 2048 * 128 + 8 * 3 * 2048 * 768
    flops = forward_flops_per_token(shape, 4096)
    assert flops.total - flops.attention == 2 * (8 * per_layer + 2048 * 151936)
    assert training_flops_per_token(shape, 4096) == pytest.approx(5.40e9, rel=2e-3)


def test_experts_beyond_the_top_k_cost_only_their_router_column():
    more = replace(GQA, num_experts=60)
    extra = forward_flops_per_token(more, LENGTH).total - forward_flops_per_token(GQA, LENGTH).total
    assert extra == GQA.num_hidden_layers * 2 * GQA.hidden_size * (60 - 6)
