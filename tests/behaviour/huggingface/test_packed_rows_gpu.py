"""Packed rows of wrapped models on a GPU, in bf16: rounding is not taken for a document's influence."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.testing import requires_gpu, requires_transformers
from tests.support.moe_families import tiny_model

pytestmark = [requires_gpu, requires_transformers]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "afmoe"])
def test_a_family_that_separates_documents_packs_in_bf16(family: str) -> None:
    model = tiny_model(family).to("cuda", torch.bfloat16)
    assert WrappedCausalLM(model, packed_rows=512)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "llama4_text"])
def test_a_family_that_does_not_is_refused_in_bf16(family: str) -> None:
    model = tiny_model(family).to("cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match="documents that share a row"):
        WrappedCausalLM(model, packed_rows=512)
