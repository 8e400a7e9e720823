"""The auxiliary loss of Hugging Face models, made anew from their router logits."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.huggingface.balance import AuxiliaryLoss
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import randomize
from tests.support.hf_tiny import VOCABULARY, batch, tiny_hf

pytestmark = requires_transformers


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")),
        ("mixtral", torch.bfloat16),
    ],
)
def test_it_is_the_models_own_over_the_tokens_of_one_rank(family: str, dtype: torch.dtype) -> None:
    model = tiny_hf(family).to(dtype)
    tokens = batch(0, 0, length=32)
    out = model(tokens, use_cache=False)
    auxiliary = AuxiliaryLoss(model)
    share = auxiliary.own(out, 0.25)
    assert share.item() == pytest.approx(0.05 * out.aux_loss.item() / 4, rel=1e-2)
    again = auxiliary.shared(out, RoutingContext(num_global_tokens=4 * tokens.numel()))
    bound = 1e-5 if dtype == torch.float32 else 5e-2  # in bfloat16 experts may tie
    assert again.item() == pytest.approx(share.item(), rel=bound)


def test_a_model_without_router_logits_is_refused_and_not_trained_without_the_loss_it_asks_for() -> None:
    model = tiny_hf("qwen3_moe")
    plain = model.forward

    def without_logits(*args: Any, **kwargs: Any) -> Any:  # as transformers 5.17 answers for granite's models
        out = plain(*args, **kwargs)
        return types.SimpleNamespace(logits=out.logits, loss=None, router_logits=None, aux_loss=0)

    decoder, tokens = WrappedCausalLM(model), batch(0, 0)
    model.forward = without_logits  # type: ignore[method-assign]
    columns = {"labels_BS": tokens, "loss_mask_BS": torch.ones_like(tokens, dtype=torch.bool)}
    with pytest.raises(ConfigError, match="got none: this release of transformers does not keep them"):
        decoder(tokens, **columns)


def jetmoe() -> Any:
    import transformers

    config = transformers.JetMoeConfig(
        **_TINY, hidden_size=16, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, aux_loss_coef=0.3,
    )  # fmt: skip
    return transformers.JetMoeForCausalLM(config)


def dbrx() -> Any:
    import transformers

    config = transformers.DbrxConfig(
        **_TINY, d_model=16, n_layers=2, n_heads=2, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.3},
    )  # fmt: skip
    return transformers.DbrxForCausalLM(config)


_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "output_router_logits": True, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("build", [jetmoe, dbrx])
def test_families_weigh_it_by_what_they_call_its_coefficient(build: Callable[[], Any]) -> None:
    model = build()
    model.set_attn_implementation("eager")
    randomize(model, 0.3)
    tokens = batch(0, 0, length=16)
    try:
        plain = model(tokens, labels=tokens, use_cache=False)
    except AttributeError as error:
        pytest.skip(f"this transformers computes no auxiliary loss of the family: {error}")
    if plain.aux_loss is None:
        pytest.skip("this transformers computes no auxiliary loss of the family")
    mask = torch.ones_like(tokens, dtype=torch.bool).index_fill(1, torch.tensor([15]), False)
    try:
        out = WrappedCausalLM(model)(tokens, labels_BS=tokens.roll(-1, 1), loss_mask_BS=mask)
    except AttributeError as error:
        pytest.fail(str(error))
    assert out.balance_loss.item() == pytest.approx(0.3 * plain.aux_loss.item(), rel=1e-5)
    assert out.loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)
    again = AuxiliaryLoss(model).shared(plain, RoutingContext(num_global_tokens=tokens.numel()))
    assert again.item() == pytest.approx(out.balance_loss.item(), rel=1e-5)


class Unknown(nn.Module):
    config = types.SimpleNamespace(num_experts_per_tok=2, router_aux_loss_coef=0.1)


def test_one_of_another_form_is_refused() -> None:
    out: Any = types.SimpleNamespace(router_logits=(torch.zeros(4, 8),))
    with pytest.raises(ConfigError, match=r"mesh\.cp: the auxiliary loss of Unknown is not known here"):
        AuxiliaryLoss(Unknown()).shared(out, RoutingContext(num_global_tokens=4))


def test_one_without_a_coefficient_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.config = types.SimpleNamespace(get_text_config=types.SimpleNamespace)  # type: ignore[assignment]
    out: Any = types.SimpleNamespace(aux_loss=torch.ones(()))
    with pytest.raises(ConfigError, match="expected router_aux_loss_coef or aux_loss_coef in Linear or its"):
        AuxiliaryLoss(model).own(out, 1.0)
