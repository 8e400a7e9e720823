"""Hugging Face models run on split, packed rows through their own attention interface."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.attention import huggingface_attention
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.attention_reference import relative_error

LENGTHS = [13, 6, 1, 12]
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def build_model(name: str) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if name == "qwen3_moe":
        config = Qwen3MoeConfig(
            **COMMON, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)
    config = DeepseekV3Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def gradients(model: nn.Module, logits: Tensor, weights: Tensor) -> list[Tensor]:
    """Of a loss that is a sum over tokens."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def split_model(name: str, mode: str) -> tuple[float, float]:
    """Errors of logits and gradients against the documents one by one in one process."""
    from transformers import AttentionInterface

    tokens = torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    weights = torch.randn(1, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(4))
    model = build_model(name)
    whole = torch.cat([model(part).logits for part in tokens.split(LENGTHS, dim=1)], dim=1)
    expected = gradients(model, whole, weights)

    AttentionInterface.register("context_parallel", huggingface_attention(mode))
    model.set_attn_implementation("context_parallel")
    group, rank = dist.group.WORLD, dist.get_rank()
    split = split_documents([LENGTHS], dist.get_world_size())
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    logits = model(
        split.shard(tokens, rank),
        position_ids=split.shard(positions, rank),
        attention_plan=AttentionPlan(split, group),
        use_cache=False,
    ).logits
    found = gradients(model, logits, split.shard(weights, rank))
    for grad in found:
        dist.all_reduce(grad)
    logit_error = relative_error(split.gather(logits, group), whole)
    return logit_error, max(relative_error(*pair) for pair in zip(found, expected, strict=True))


@requires_transformers
@pytest.mark.parametrize(("name", "mode"), [("qwen3_moe", "ring"), ("deepseek_v3", "all_to_all")])
def test_a_split_model_equals_its_documents_one_by_one(name: str, mode: str) -> None:
    for errors in run_ranks(split_model, 2, name, mode):
        assert max(errors) < 1e-5


def test_what_it_cannot_do_is_refused() -> None:
    attend = huggingface_attention("ring")
    x = torch.randn(1, 2, 4, 8)
    plan = AttentionPlan(split_documents([[4]], 1))
    out, _ = attend(nn.Identity(), x, x, x, None, scaling=0.3, dropout=0.0, attention_plan=plan)
    assert out.shape == (1, 4, 2, 8)
    with pytest.raises(ConfigError, match="attention_plan: expected an AttentionPlan"):
        attend(nn.Identity(), x, x, x, None)
    with pytest.raises(ConfigError, match="sliding_window: expected none"):
        attend(nn.Identity(), x, x, x, None, attention_plan=plan, sliding_window=3)
    wide, _ = attend(nn.Identity(), x, x, x, None, scaling=0.3, attention_plan=plan, sliding_window=4)
    assert torch.equal(wide, out)  # a window over the whole row hides nothing
    with pytest.raises(ConfigError, match=r"s_aux: expected none .* got attention sinks; switch it off"):
        attend(nn.Identity(), x, x, x, x, attention_plan=plan, s_aux=x)
    with pytest.raises(ConfigError, match=r"position_bias: expected none .* a bias of their own"):
        attend(nn.Identity(), x, x, x, None, attention_plan=plan, position_bias=x)
    with pytest.raises(ConfigError, match="dropout: expected none"):
        attend(nn.Identity(), x, x, x, None, attention_plan=plan, dropout=0.1)
