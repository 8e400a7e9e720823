"""Parts of wrapped models that are recomputed, called as their users call them."""

from __future__ import annotations

from typing import Any

import torch

import fsdmoe
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
