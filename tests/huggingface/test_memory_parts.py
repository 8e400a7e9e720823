"""Parts of wrapped models that are recomputed, called as their users call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdmoe
from fsdmoe.errors import ConfigError
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import VOCABULARY, tiny_hf

pytestmark = requires_transformers


def gradients(recompute: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Of a call that leaves ``use_cache`` as it is: on."""
    torch.manual_seed(0)
    model: Any = tiny_hf("qwen3_moe")
    model.set_attn_implementation("sdpa")
    policy = fsdmoe.ParallelPolicy(memory=MemoryConfig(recompute=recompute))
    fsdmoe.parallelize(model, fsdmoe.build_meshes(), policy)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    assert model.config.use_cache
    model.train()(tokens, labels=tokens).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def compare() -> None:
    wanted = gradients(())
    for recompute in (("layer",), ("attention_projections",)):
        found = gradients(recompute)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_a_cache_in_training_is_not_written_twice() -> None:
    run_ranks(compare, 1)


def prefixed(recompute: tuple[Any, ...]) -> tuple[float, float] | str:
    """A logit of a token behind others: those given as a cache, or in the same row. Why, where that is
    refused."""
    model: Any = tiny_hf("qwen3_moe")
    model.set_attn_implementation("sdpa")
    policy = fsdmoe.ParallelPolicy(memory=MemoryConfig(recompute=recompute))
    fsdmoe.parallelize(model, fsdmoe.build_meshes(), policy)
    tokens = torch.randint(VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = model(tokens[:, :6], use_cache=True).past_key_values
    assert cache.get_seq_length() == 6
    try:
        behind = model.train()(tokens[:, 6:], past_key_values=cache).logits[0, -1, 0]
    except ConfigError as error:
        return str(error)
    return behind.item(), model(tokens, use_cache=False).logits[0, -1, 0].item()


def test_a_cache_that_a_caller_gives_is_used_or_refused_by_name() -> None:
    ((behind, whole),) = run_ranks(prefixed, 1, ())
    assert behind == pytest.approx(whole, rel=1e-5)
    (told,) = run_ranks(prefixed, 1, ("layer",))
    assert str(told).startswith("past_key_values: expected none in a forward of Qwen3MoeModel with gradients")
