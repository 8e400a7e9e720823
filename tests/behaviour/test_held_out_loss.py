"""The held-out loss: one number, whatever the number of ranks and how they share rows, and transformers'."""

from typing import Any

import numpy as np
import pytest
import torch

from fsdmoe import as_causal_lm
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.data.stream import DataStream
from fsdmoe.feed import Feed
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.corpora import memory_config, memory_store, open_streams
from tests.support.hf_pairs import hf_model, native_model, tiny

# Documents of one token have no next one to predict: rows of their own, without loss, between the others.
HELD_OUT = [21, *[1] * 19, 40, 18, 5, 40]
SILENT = [1] * 9
TRAINED = [30]
ROWS = 12
"""Of a global batch, so that 1 to 4 ranks can share it; there are 18 held-out ones."""
LIMITS = (1, 9)
"""Of global batches: the first alone, or all rows."""
FLOAT32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
RING = ContextParallelConfig(mode="ring")
DYNAMIC = ContextParallelConfig(dynamic=True, max_tokens=8)


def streams(held_out: list[int], num_ranks: int) -> list[DataStream]:
    hashes = [i for i, _ in enumerate(held_out)] + [2**63 + 1 + i for i, _ in enumerate(TRAINED)]
    store = memory_store("a", held_out + TRAINED, hashes=np.array(hashes, np.uint64))
    return open_streams([store], memory_config([1.0], holdout=0.5), ranks=num_ranks, rows=ROWS)


def held_out_loss(
    kind: str, mesh: MeshConfig, context: ContextParallelConfig, held_out: list[int]
) -> list[float] | str:
    """On the ranks of ``mesh``, for each limit; why, where it is refused."""
    meshes, config = build_meshes(mesh), tiny("qwen3_moe", vocab_size=192)
    plain = hf_model(config)
    given = plain if kind == "wrapped" else native_model(config, plain)
    model = parallelize(given, meshes, ParallelPolicy(precision=FLOAT32))
    feed = Feed(meshes, context, own_attention=kind == "wrapped", dtype=torch.float32)
    axis = feed.data_axis
    stream = streams(held_out, meshes.size(axis))[meshes.rank(axis)]
    lm: Any = as_causal_lm(model) if kind == "wrapped" else model
    try:
        return [feed.held_out_loss(lm, stream.eval_batches(limit)) for limit in LIMITS]
    except ConfigError as error:
        return str(error)


@torch.no_grad()
def transformers_loss(num_batches: int) -> float:
    """All rows in one call."""
    batches = list(streams(HELD_OUT, 1)[0].eval_batches(num_batches))
    rows = Batch(**{name: torch.cat([b.columns[name] for b in batches]) for name in batches[0].columns})
    assert not all(batch.loss_mask_BS.any() for batch in batches), "some rows have no loss"
    model = hf_model(tiny("qwen3_moe", vocab_size=192)).eval()
    targets_BS = rows.labels_BS.masked_fill(~rows.loss_mask_BS, -100)
    out = model(
        rows.tokens_BS, position_ids=rows.positions_BS, labels=targets_BS, shift_labels=targets_BS,
        use_cache=False,
    )  # fmt: skip
    return out.loss.item()


@requires_transformers
@pytest.mark.parametrize("numbers", [(1, 3), pytest.param((1, 2, 4), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("kind", ["native", "wrapped"])
def test_it_is_that_of_transformers_on_any_number_of_ranks(kind: str, numbers: tuple[int, ...]) -> None:
    wanted = [transformers_loss(limit) for limit in LIMITS]
    found: list[Any] = []
    for num_ranks in numbers:
        mesh = MeshConfig(ep=num_ranks if num_ranks != 3 else 1)
        found += run_ranks(held_out_loss, num_ranks, kind, mesh, RING, HELD_OUT)
    for each in found:
        assert each == pytest.approx(wanted, abs=1e-5, rel=0)
        assert each == pytest.approx(found[0], abs=1e-6, rel=0)


LAYOUTS = [
    pytest.param("native", 2, MeshConfig(cp=2), RING, marks=pytest.mark.full),
    ("wrapped", 3, MeshConfig(dp_shard=3), DYNAMIC),
    pytest.param("wrapped", 2, MeshConfig(cp=2), RING, marks=pytest.mark.full),
    pytest.param("native", 2, MeshConfig(tp=2), RING, marks=pytest.mark.full),
    pytest.param("wrapped", 2, MeshConfig(tp=2), RING, marks=pytest.mark.full),
    pytest.param("native", 4, MeshConfig(tp=2, cp=2, ep=4), RING, marks=pytest.mark.full),
    pytest.param("wrapped", 4, MeshConfig(tp=2, cp=2, ep=4), RING, marks=pytest.mark.full),
    pytest.param("native", 3, MeshConfig(dp_shard=3), DYNAMIC, marks=pytest.mark.full),
]


@requires_transformers
@pytest.mark.parametrize(("kind", "num_ranks", "mesh", "context"), LAYOUTS, ids=str)
def test_it_is_the_same_where_ranks_share_rows(
    kind: str, num_ranks: int, mesh: MeshConfig, context: ContextParallelConfig
) -> None:
    (alone,) = run_ranks(held_out_loss, 1, kind, MeshConfig(), RING, HELD_OUT)
    for found in run_ranks(held_out_loss, num_ranks, kind, mesh, context, HELD_OUT):
        assert found == pytest.approx(alone, abs=1e-6, rel=0)


@requires_transformers
def test_where_no_held_out_token_has_a_loss_it_is_refused_by_name() -> None:
    for told in run_ranks(held_out_loss, 2, "native", MeshConfig(), RING, SILENT):
        assert str(told).startswith("data.holdout: expected held-out rows with tokens that have a loss")
