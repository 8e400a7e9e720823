"""Inputs at fixed addresses: which micro-batches share them, and what stands there."""

from typing import Any

import pytest
import torch

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.graphs.static_inputs import GivenBatch, StaticInputs, shape_key
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.causal_lm import StepCounts


def micro_batch(
    lengths: list[int] | None = None, rows: int = 2, length: int = 8, fill: int = 0
) -> GivenBatch:
    """``lengths`` of the documents of each row, which is then packed."""
    tokens = torch.full((rows, length), fill)
    inputs: dict[str, Any] = {"tokens_BS": tokens, "labels_BS": tokens + 1, "document_ids_BS": None}
    if lengths is not None:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(rows, length)
        inputs["document_ids_BS"] = ids
        inputs["split"] = SplitRows(AttentionPlan(split_rows(ids, 1), None, "cpu"), ContextAttention())
    counts = StepCounts(torch.tensor(16.0), torch.tensor(float(fill)))
    return GivenBatch(inputs, counts, RoutingContext())


def test_micro_batches_share_graphs_by_their_shapes_alone() -> None:
    assert shape_key(micro_batch(fill=1)) == shape_key(micro_batch(fill=2))
    keys = {shape_key(micro_batch(rows=r, length=s)) for r, s in ((2, 8), (2, 16), (4, 8))}
    assert len(keys) == 3
    assert shape_key(micro_batch([3, 5])) != shape_key(micro_batch())


def test_packed_rows_share_graphs_whatever_their_documents() -> None:
    few, others = shape_key(micro_batch([3, 5])), shape_key(micro_batch([1, 2, 2, 3]))
    assert few == others
    many = shape_key(micro_batch([1] * 20, length=20))
    assert many is not None
    assert many.num_borders == 64
    assert "20 tokens, up to 64 packed documents" in str(many)


def test_rows_that_several_ranks_share_have_no_key() -> None:
    ids = torch.zeros(1, 8, dtype=torch.long)
    batch = micro_batch(rows=1)
    plan = AttentionPlan(split_rows(ids, 1), None, "cpu")
    batch.inputs["split"] = SplitRows(plan, ContextAttention(), by_document=True)
    assert shape_key(batch) is None


def test_inputs_are_filled_in_place() -> None:
    static = StaticInputs(micro_batch(fill=1), 0)
    arguments, counts = static.arguments(), static.counts()
    static.fill(micro_batch(fill=7))
    assert arguments["tokens_BS"].unique().tolist() == [7]
    assert arguments["labels_BS"].unique().tolist() == [8]
    assert arguments["document_ids_BS"] is None
    assert (counts.tokens.item(), counts.loss_tokens.item()) == (16.0, 7.0)


def test_borders_beyond_the_last_document_are_those_of_empty_ones() -> None:
    static = StaticInputs(micro_batch([3, 5]), 16)
    block = static.arguments()["split"].plan.whole
    assert block.query_ends[:6].tolist() == [0, 3, 8, 11, 16, 16]
    static.fill(micro_batch([1, 2, 5]))
    assert block.query_ends.tolist() == [0, 1, 3, 8, 9, 11, *[16] * 11]
    assert (block.max_queries, block.is_uniform) == (8, False)
    with pytest.raises(ConfigError, match=r"train\.graphs: expected attention to packed rows by a kernel"):
        list(block.segments())


def test_loads_of_earlier_micro_batches_join_with_the_second() -> None:
    static = StaticInputs(micro_batch(), 0)
    assert static.routing(first=True).prior_load_LE is None
    prior = torch.arange(6.0).view(2, 3)
    static.fill(micro_batch()._replace(routing=RoutingContext(prior_load_LE=prior)))
    found = static.routing(first=False).prior_load_LE
    assert found is not None
    assert torch.equal(found, prior)
    assert found is not prior


def test_what_is_padding_is_an_input_like_any_other() -> None:
    def padded(mask: torch.Tensor) -> GivenBatch:
        return micro_batch()._replace(routing=RoutingContext(token_mask_T=mask))

    mask = torch.ones(2, 8, dtype=torch.bool)
    assert shape_key(padded(mask)) == shape_key(padded(~mask)) != shape_key(micro_batch())
    static = StaticInputs(padded(mask), 0)
    found = static.routing(first=True).token_mask_T
    static.fill(padded(~mask))
    assert found is not None
    assert not found.any()
    assert StaticInputs(micro_batch(), 0).routing(first=True).token_mask_T is None
