"""Packed rows on a GPU: planned without being asked, and attending as masked ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdmoe.context_parallel.config import ContextParallelConfig, Varlen
from fsdmoe.feed import Feed
from fsdmoe.mesh import build_meshes
from fsdmoe.models.attention import AttentionContext
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.testing import requires_gpu, requires_transformers
from tests.feed.test_feed import planned
from tests.support.hf_tiny import tiny_hf
from tests.support.parallel_case import MODELS, rows_of


@pytest.fixture
def gpu_rank(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank, on a GPU: pooled ranks compute on the CPU."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@requires_gpu
def test_packed_rows_are_planned_on_a_gpu_without_being_asked(gpu_rank: None) -> None:
    assert planned("auto", torch.bfloat16) == (True, False)
    assert planned("auto", torch.float32) == (False, False)


def attend(varlen: Varlen, widths: tuple[int, int], num_kv_heads: int) -> list[torch.Tensor]:
    """Output and gradients of attention over packed rows, in bf16 on the device."""
    feed = Feed(build_meshes(), ContextParallelConfig(varlen=varlen), dtype=torch.bfloat16)
    inputs = feed.inputs(feed.prepare([rows_of(0)]))[0]
    positions, documents = inputs["positions_BS"], inputs["document_ids_BS"]
    context = AttentionContext.build(positions, documents, MODELS["qwen3_moe"], inputs.get("split"))
    generator = torch.Generator("cuda").manual_seed(0)
    heads = ((8, widths[0]), (num_kv_heads, widths[0]), (num_kv_heads, widths[1]), (8, widths[1]))
    q, k, v, grad = (
        torch.randn(*positions.shape, *each, device="cuda", generator=generator).bfloat16() for each in heads
    )
    given = [x.requires_grad_() for x in (q, k, v)]
    out = context.attend(q, k, v, 0.2)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


@requires_gpu
@pytest.mark.parametrize(
    ("widths", "num_kv_heads"), [((64, 64), 2), ((24, 16), 8)], ids=["grouped", "latent"]
)
def test_planned_rows_attend_as_masked_ones_on_a_gpu(
    widths: tuple[int, int], num_kv_heads: int, gpu_rank: None
) -> None:
    planned_rows, masked = (attend(varlen, widths, num_kv_heads) for varlen in ("auto", "never"))
    for found, wanted in zip(planned_rows, masked, strict=True):
        assert (found - wanted).float().norm() / wanted.float().norm() <= 1e-2


@requires_gpu
@requires_transformers
def test_a_wrapped_model_attends_by_plans_where_it_can(gpu_rank: None) -> None:
    feed = Feed(build_meshes(), own_attention=True, dtype=torch.bfloat16)
    batch = rows_of(0)
    model = as_causal_lm(
        tiny_hf("qwen3_moe", vocab_size=256, moe_intermediate_size=16).to("cuda", torch.bfloat16)
    )
    losses = []
    for _ in range(2):
        (inputs,) = feed.inputs(feed.prepare([batch]))
        losses.append(model(**inputs).loss.item())
        feed.plan_packed_rows(model, batch.tokens_BS.shape[1])
    assert "split" in inputs
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
