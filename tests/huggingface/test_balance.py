"""The auxiliary loss of Hugging Face models, made anew from their router logits."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.huggingface.balance import AuxiliaryLoss
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import batch, tiny_hf

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


class Unknown(nn.Module):
    config = types.SimpleNamespace(num_experts_per_tok=2, router_aux_loss_coef=0.1)


def test_one_of_another_form_is_refused() -> None:
    out: Any = types.SimpleNamespace(router_logits=(torch.zeros(4, 8),))
    with pytest.raises(ConfigError, match=r"mesh\.cp: the auxiliary loss of Unknown is not known here"):
        AuxiliaryLoss(Unknown()).shared(out, RoutingContext(num_global_tokens=4))
