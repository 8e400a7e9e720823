"""Where the attention of packed rows is planned, and that a planned row trains as a masked one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdmoe.context_parallel.config import ContextParallelConfig, Varlen
from fsdmoe.data import Batch
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Feed, Initializer, build_model, materialize
from fsdmoe.testing import requires_gpu, run_ranks
from tests.behaviour.parallel_case import EXPERTS, MODELS, rows_of


def one_document_a_row() -> Batch:
    packed = rows_of(0)
    nothing = torch.zeros_like(packed.document_ids_BS)
    places = torch.arange(nothing.shape[1]).expand_as(nothing)
    return Batch(packed.tokens_BS, packed.labels_BS, places, nothing, packed.loss_mask_BS)


def planned(varlen: Varlen, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether packed rows, and rows of one document, get a plan."""
    feed = Feed(build_meshes(), ContextParallelConfig(varlen=varlen), dtype=dtype)
    packed, whole = feed.prepare([rows_of(0), one_document_a_row()])
    return packed.split is not None, whole.split is not None


def test_plans_are_made_where_asked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(planned, 1, "always", dtype) == [(True, True)]
        assert run_ranks(planned, 1, "never", dtype) == [(False, False)]
    assert run_ranks(planned, 1, "auto", torch.float32) == [(False, False)], "the kernel takes 16 bits"


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


def gradients(family: str, varlen: Varlen) -> tuple[float, torch.Tensor]:
    meshes = build_meshes()
    model = build_model(MODELS[family], EXPERTS)
    materialize(model, meshes.device, Initializer(0, 0.05, meshes))
    model.to(torch.bfloat16)
    feed = Feed(meshes, ContextParallelConfig(varlen=varlen), dtype=torch.bfloat16)
    inputs = feed.inputs(feed.prepare([rows_of(0)]))
    out = model(**inputs[0], counts=feed.count(model, inputs), routing=feed.routing())
    out.loss.backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return out.cross_entropy.item(), torch.cat(found).cpu()


@requires_gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_planned_rows_give_the_gradients_of_masked_ones_on_a_gpu(family: str, gpu_rank: None) -> None:
    (loss, gradient), (expected_loss, expected) = (gradients(family, varlen) for varlen in ("auto", "never"))
    error = ((gradient - expected).norm() / expected.norm()).item()
    print(f"{family}: loss {loss:.5f} and {expected_loss:.5f}, gradients differ by {error:.1e}")
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert error <= 2e-2
