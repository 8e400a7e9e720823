"""Where the attention of packed rows is planned, and that planned rows attend as masked ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdmoe.context_parallel.config import ContextParallelConfig, Varlen
from fsdmoe.data import Batch
from fsdmoe.data.origin import Origin
from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.experts.routing_file import Recording
from fsdmoe.feed import Feed
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.parallel_case import rows_of
from tests.support.scripts import run_program

ROOT = Path(__file__).parent.parent.parent


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


def record_a_step(folder: Path) -> list[str]:
    """Files of a step that more ranks had recorded before."""
    for rank in range(3):
        (folder / f"step-00000004-rank-{rank:05d}.safetensors").write_text("earlier")
    feed = Feed(build_meshes(), experts=ExpertsConfig(record=str(folder)))
    batch = rows_of(0)
    origin = Origin.of_rows(["a", "b"], [8, 8], 8)
    rows = Batch(**{name: column[:2, :8] for name, column in batch.columns.items()}, origin=origin)
    (inputs,) = feed.inputs(feed.prepare([rows]))
    context = feed.routing(inputs)
    assert feed.routing().replay is None, "evaluation is not recorded"
    router = Router(RouterSpec(num_experts=4, top_k=2), 3)
    flat = replace(context, origin=origin.map(lambda column: column.flatten()))
    router(torch.randn(16, 3), context=flat)
    feed.end_step(4, 1.0)
    feed.end_step(5, 1.0)
    with pytest.raises(ConfigError, match="expected batches that say which documents"):
        feed.routing(feed.inputs(feed.prepare([batch]))[0])
    Recording.open(folder).columns(flat.origin)  # type: ignore[arg-type]
    return sorted(path.name for path in folder.iterdir())


def test_a_step_that_is_recorded_again_leaves_no_files_of_more_ranks(tmp_path: Path) -> None:
    assert run_ranks(record_a_step, 1, tmp_path)[0] == ["step-00000004-rank-00000.safetensors"]


def test_the_benchmark_of_packed_rows_gives_one_loss_either_way() -> None:
    done = run_program("benchmarks/packed_rows.py", "--tiny")
    assert done.wait() == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)
