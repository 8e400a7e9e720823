"""Bytes on the wire and bytes kept by tensor-parallel layers, counted where torch sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.mesh import build_meshes
from fsdmoe.models.attention import AttentionContext, GroupedQueryAttention, LatentAttention, SplitRows
from fsdmoe.models.decoder import DenseMLP
from fsdmoe.tensor_parallel.split import parallelize_tensors
from fsdmoe.tensor_parallel.volume import sent_bytes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.parallel_case import MODELS
from tests.support.sent_bytes import SentBytes, tensor_parallel_elements

ROWS, LENGTH = 2, 16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 32, 16, 8, 4, 32


def attention_kept_bytes(
    num_tokens: int, hidden: int, heads: tuple[int, int], head_dim: int, size: int, bytes_per_element: int = 2
) -> int:
    """Of grouped-query attention without norms: the gathered input, queries, keys and values, its output and
    log-sum-exps; ``heads``: query and key-value heads of the whole model."""
    inside = size * num_tokens
    columns = 2 * sum(heads) * head_dim // size
    return inside * (hidden + columns) * bytes_per_element + 4 * inside * heads[0] // size


def mlp_kept_bytes(num_tokens: int, hidden: int, width: int, size: int, bytes_per_element: int = 2) -> int:
    """Its input, gate, up, the activated gate and their product."""
    return size * num_tokens * (hidden + 4 * width // size) * bytes_per_element


def count(kind: str) -> tuple[int, int, int]:
    """Bytes sent forward, sent backward, and kept."""
    meshes = build_meshes(tp=dist.get_world_size())
    torch.manual_seed(0)
    config = MODELS["deepseek_v3" if kind == "latent" else "mixtral"]
    module: nn.Module = (
        {"grouped": GroupedQueryAttention, "latent": LatentAttention}[kind](config)
        if kind != "mlp"
        else DenseMLP(HIDDEN, WIDTH)
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    parallelize_tensors(module, meshes)
    use_local_tensors(module)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    plan = AttentionPlan(split_documents([[LENGTH]] * ROWS, 1))
    context = AttentionContext.build(positions, None, config, SplitRows(plan, ContextAttention()))
    arguments = () if kind == "mlp" else (context,)
    x = torch.randn(ROWS, LENGTH // meshes.degrees.tp, HIDDEN, requires_grad=True)
    given = [*module.parameters(), x, context.cos_BSP, context.sin_BSP]
    return measure(lambda: module(x, *arguments), {each.untyped_storage().data_ptr() for each in given})


def measure(forward: Callable[[], Tensor], known: set[int]) -> tuple[int, int, int]:
    storages: dict[int, Any] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in known:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with SentBytes() as sent, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = forward()
    with SentBytes() as sent_back:
        out.sum().backward()
    return sent.total, sent_back.total, sum(each.nbytes() for each in storages.values())


@pytest.mark.parametrize("size", [2, 4])
def test_grouped_attention_sends_and_keeps_what_the_formulas_say(size: int) -> None:
    tokens = ROWS * LENGTH // size
    sends = sent_bytes(tokens, HIDDEN, HIDDEN, size, 4)
    keeps = attention_kept_bytes(tokens, HIDDEN, (HEADS, KV_HEADS), HEAD_DIM, size, 4)
    assert run_ranks(count, size, "grouped") == [(sends, sends, keeps)] * size
    assert sends == 4 * tensor_parallel_elements(ROWS, LENGTH, HIDDEN, size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_dense_layer_sends_and_keeps_what_the_formulas_say(size: int) -> None:
    tokens = ROWS * LENGTH // size
    sends = sent_bytes(tokens, HIDDEN, HIDDEN, size, 4)
    keeps = mlp_kept_bytes(tokens, HIDDEN, WIDTH, size, 4)
    assert run_ranks(count, size, "mlp") == [(sends, sends, keeps)] * size


def test_latent_attention_sends_latents_instead_of_the_residual_stream() -> None:
    config = MODELS["deepseek_v3"]
    assert config.q_lora_rank is not None
    latents = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    sends = sent_bytes(ROWS * LENGTH // 2, latents, HIDDEN, 2, 4)
    for sent, sent_back, _ in run_ranks(count, 2, "latent"):
        assert (sent, sent_back) == (sends, sends)
