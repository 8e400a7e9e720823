"""Wrapped models whose rotary frequencies follow the length of a text: each document's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.rotary import DocumentRotary
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import VOCABULARY, tiny_hf

pytestmark = requires_transformers
LONG, SHORT = 16, 3
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 4, "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
}  # fmt: skip


def llama(kind: str) -> nn.Module:
    return tiny_hf("llama", max_position_embeddings=4, rope_parameters=ROPES[kind] | {"rope_theta": 1e4})


def tokens_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def loss_of(
    decoder: WrappedCausalLM, tokens: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> Any:
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return decoder(
        tokens, positions_BS=positions, document_ids_BS=ids, labels_BS=tokens, loss_mask_BS=mask
    ).cross_entropy


@pytest.mark.parametrize("kind", ROPES)
def test_a_document_gets_what_transformers_computes_for_it_alone_wherever_it_stands(kind: str) -> None:
    model = llama(kind)
    long, short = tokens_of(LONG, 1), tokens_of(SHORT, 2)
    alone = []
    for tokens in (long, short):  # a fresh model each: dynamic remembers
        logits = llama(kind)(tokens).logits[0]
        alone.append(nn.functional.cross_entropy(logits, tokens[0], reduction="sum").item())
    decoder = WrappedCausalLM(model)
    packed = torch.cat((long, short), 1)
    positions = torch.cat((torch.arange(LONG), torch.arange(SHORT)))[None]
    ids = torch.tensor([0] * LONG + [1] * SHORT)[None]
    found = loss_of(decoder, packed, positions, ids).item() * (LONG + SHORT)
    assert found == pytest.approx(sum(alone), rel=1e-5)
    for tokens, wanted in ((short, alone[1]), (long, alone[0])):  # whatever came before
        positions = torch.arange(tokens.shape[1])[None]
        found = loss_of(decoder, tokens, positions, torch.zeros_like(tokens)).item() * tokens.shape[1]
        assert found == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(model(long).logits, llama(kind)(long).logits), "other callers get the model's own"


def test_a_form_that_is_not_known_is_left_alone_and_refused_where_rows_are_split() -> None:
    model = llama("longrope")
    model.model.rotary_emb.attention_scaling = 3.0  # type: ignore[union-attr]
    assert DocumentRotary(model).unknown == ["model.rotary_emb"]
    decoder = WrappedCausalLM(model)
    with pytest.raises(ConfigError, match=r"mesh\.cp: expected rotary .* got model\.rotary_emb, whose form"):
        decoder._check_rows(16)
