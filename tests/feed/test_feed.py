"""Where the attention of packed rows is planned, and that planned rows attend as masked ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.context_parallel.config import ContextParallelConfig, Varlen
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.data.origin import Origin
from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.experts.routing_file import Recording
from fsdmoe.feed import Feed
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder, preset_config
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_pairs import randomize
from tests.support.hf_tiny import tiny_hf
from tests.support.parallel_case import rows_of
from tests.support.scripts import run_program

ROOT = Path(__file__).parent.parent.parent
TERMS = BalanceConfig(sequence=0.1, micro_batch=0.1, z_loss=0.1)
CAPACITY = CapacityConfig(factor=1.0)


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


def padded(row_length: int) -> Batch:
    """Documents of 5 and of 8 tokens, a row each, and padding behind them."""
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(3))
    origin = Origin.of_rows(["a", "b"], [5, 8], row_length)
    is_token = origin.document >= 0
    tokens = torch.nn.functional.pad(tokens, (0, row_length - 8)) * is_token
    places = torch.arange(row_length).expand_as(tokens)
    return Batch(tokens, tokens, places, (~is_token).long(), is_token, origin)


def terms_of(kind: str, row_length: int) -> tuple[float, float, list[list[float]]]:
    """Of a step on padded rows: next-token loss, balance terms and loads."""
    if kind == "native":
        model: Any = Decoder(preset_config("tiny-qwen3"), ExpertsConfig(balance=TERMS, capacity=CAPACITY))
        randomize(model, 0.3)
    else:
        model = WrappedCausalLM(tiny_hf("qwen3_moe"))
    feed = Feed(build_meshes(), own_attention=kind != "native")
    inputs = feed.inputs(feed.prepare([padded(row_length)]))
    counts = feed.count(model, inputs)
    assert counts.tokens == 13
    out = model(**inputs[0], counts=counts, routing=feed.routing(inputs[0]))
    return out.cross_entropy.item(), out.balance_loss.item(), out.loads_LE.tolist()


@requires_transformers
@pytest.mark.parametrize("kind", ["native", "wrapped"])
def test_padding_changes_no_balance_term_and_takes_no_capacity(kind: str) -> None:
    short, long = (run_ranks(terms_of, 1, kind, row_length)[0] for row_length in (9, 16))
    assert short[1] > 0
    assert long[:2] == pytest.approx(short[:2], rel=1e-5)
    if kind == "native":  # loads of a model that routes by itself are those of all rows that experts compute
        assert long[2] == short[2]


@pytest.mark.full
def test_the_benchmark_of_packed_rows_gives_one_loss_either_way() -> None:
    done = run_program("benchmarks/packed_rows.py", "--tiny")
    assert done.wait() == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)
