"""Wrapped models on a GPU: their layers through our kernels against transformers' own, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface import attention_forward
from fsdmoe.memory.config import MemoryConfig, Part
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_gpu, requires_transformers
from tests.support.hf_tiny import tiny_hf

pytestmark = [requires_gpu, requires_transformers]
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "moe_intermediate_size": 128, "max_position_embeddings": 512,
    "output_router_logits": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
WIDE = ParallelPolicy(  # experts in fp32 one after the other: exact on any GPU
    precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32", main_dtype="float32"),
    experts=ExpertsConfig(compute="sequential"),
    grad_divisor=1.0,
)
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield build_meshes()
    dist.destroy_process_group()
    torch.set_float32_matmul_precision(before)


def model_of(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    changes = SIZES | (LATENT if family.startswith("deepseek") else {})
    model: Any = tiny_hf(family, randomized=False, initializer_range=0.05, **changes).to("cuda", dtype)
    if family != "gpt_oss":  # has no sdpa
        model.set_attn_implementation("sdpa")
    return model.train()


def gradients_of(model: Any, *, packed: bool) -> Gradients:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (2, 384), generator=random).cuda()
    positions = torch.cat((torch.arange(128), torch.arange(256))).cuda().expand(2, -1) if packed else None
    model(tokens, labels=tokens, position_ids=positions, use_cache=False).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: getattr(g, "full_tensor", g.clone)().float() for n, g in found.items()}


def distance(found: Gradients, expected: Gradients) -> float:
    squares = [(found[n] - g).square().sum() for n, g in expected.items()]
    whole = [g.square().sum() for g in expected.values()]
    return (torch.stack(squares).sum() / torch.stack(whole).sum()).sqrt().item()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, packed: bool, meshes: Meshes) -> None:
    exact = gradients_of(model_of(family, torch.float32), packed=packed)
    wide = gradients_of(parallelize(model_of(family, torch.float32), meshes, WIDE), packed=packed)
    assert distance(wide, exact) < 1e-4
    plain = gradients_of(model_of(family, torch.bfloat16), packed=packed)
    narrow = gradients_of(parallelize(model_of(family, torch.bfloat16), meshes), packed=packed)
    # Rounding moves a few choices of experts, other ones in each.
    assert distance(narrow, exact) < 2 * distance(plain, exact) + 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_norms_that_are_made_again_change_nothing(family: str, meshes: Meshes) -> None:
    found = []
    recomputed: tuple[tuple[Part, ...], ...] = ((), ("norms",))
    for recompute in recomputed:
        policy = ParallelPolicy(memory=MemoryConfig(recompute=recompute), grad_divisor=1.0)
        model = parallelize(model_of(family, torch.bfloat16), meshes, policy)
        found.append(gradients_of(model, packed=False))
    kept, remade = found
    assert distance(remade, kept) < 1e-3


@pytest.mark.parametrize("packed", [False, True])
def test_attention_takes_cudnn(packed: bool, meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, own = [], attention_forward.takes_cudnn

    def watched(*tensors: Any) -> bool:
        taken.append(own(*tensors))
        return taken[-1]

    monkeypatch.setattr(attention_forward, "takes_cudnn", watched)
    gradients_of(parallelize(model_of("qwen3_moe", torch.bfloat16), meshes), packed=packed)
    assert taken == [True, True]
