"""The cost model: what it counts, and that timings give its coefficients back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fsdmoe.context_parallel.cost import CostModel, Timing, fit_attention, tiled_pairs
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_documents
from fsdmoe.context_parallel.volume import AttentionShape, sent_bytes
from fsdmoe.core.errors import ConfigError


def test_kernels_compute_whole_tiles() -> None:
    assert tiled_pairs(128, 128, causal=False) == 128 * 128
    assert tiled_pairs(1, 1, causal=True) == 128 * 128
    assert tiled_pairs(512, 512, causal=True) == 10 * 128 * 128
    assert tiled_pairs(512, 1024, causal=True) == (4 * 8 - 6) * 128 * 128


def timings_of(model: CostModel, noise: float) -> list[Timing]:
    rng = np.random.default_rng(0)
    timings = []
    for length in (64, 256, 1024, 4096, 8192):
        for queries, keys, causal in ((length, length, True), (2 * length, length, False)):
            bare = Timing((queries,) * 4, (keys,) * 4, causal, 1.0)
            calls, pairs, tokens = bare.features()
            seconds = calls * model.per_call + pairs * model.per_pair + tokens * model.per_token
            timings.append(dataclasses.replace(bare, seconds=seconds * (1 + noise * rng.standard_normal())))
    return timings


def test_fitting_recovers_the_coefficients_that_made_the_timings() -> None:
    true = CostModel(per_call=7e-5, per_pair=3e-10, per_token=2e-8)
    fitted, error = fit_attention(CostModel(), timings_of(true, noise=0.0))
    assert error < 1e-6
    for name in ("per_call", "per_pair", "per_token"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)
    noisy, error = fit_attention(CostModel(), timings_of(true, noise=0.03))
    assert noisy.per_pair == pytest.approx(3e-10, rel=0.1)
    assert 0.01 < error < 0.2


def test_no_coefficient_is_fitted_below_zero() -> None:
    timings = [
        Timing((n,), (n,), True, n * n * 1e-10 * (0.5 if n < 512 else 1)) for n in (128, 256, 1024, 4096)
    ]
    fitted, _ = fit_attention(CostModel(), timings)
    assert min(fitted.per_call, fitted.per_pair, fitted.per_token) >= 0


def test_too_few_timings_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 3 timings"):
        fit_attention(CostModel(), [])
    with pytest.raises(ConfigError, match="not negative, got \\['per_pair'\\]"):
        CostModel(per_pair=-1.0)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_attention_of_a_document_costs_its_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is that of the blocks which a rank really runs."""
    length = 8192
    split = split_documents([[length]], size)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: size)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    plan = AttentionPlan(split, None if size == 1 else object())  # type: ignore[arg-type]
    model = CostModel(per_call=0.0)
    seconds = 0.0
    for block in plan.ring:
        assert block is not None
        _, pairs, tokens = Timing(block.query_lengths, block.key_lengths, block.causal, 1.0).features()
        seconds += pairs * model.per_pair + tokens * model.per_token
    assert model.attention_seconds(length, size) == pytest.approx(seconds)


def test_splitting_short_documents_costs_more_than_it_saves() -> None:
    model = CostModel()
    assert model.attention_seconds(65536, 8) < model.attention_seconds(65536, 1) / 7
    assert model.attention_seconds(256, 8) > model.attention_seconds(256, 1) / 2


def test_the_ring_of_the_default_model_moves_what_the_formula_says() -> None:
    shape = AttentionShape(num_tokens=1, num_heads=32, num_kv_heads=4, width=128, value_width=128)
    assert CostModel().ring_bytes == sum(sent_bytes("ring", shape, 2))


def test_transfers_count_only_beyond_the_attention_that_hides_them() -> None:
    model = CostModel(fixed=0.0, rest_per_token=0.0, per_call=0.0)
    transfer = 1000 * 15 * model.ring_bytes / model.far_bandwidth
    assert model.micro_batch_seconds(2 * transfer, 16_000, 16) == pytest.approx(2 * transfer)
    assert model.micro_batch_seconds(transfer / 2, 16_000, 16) == pytest.approx(transfer)
    near = model.micro_batch_seconds(0.0, 8_000, 8)
    assert near == pytest.approx(1000 * 7 * model.ring_bytes / model.near_bandwidth)
