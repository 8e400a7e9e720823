"""What a micro-batch costs on a group of ranks: a few coefficients, fitted to measured attention timings.

Attention of one document of length ``s`` split over ``c`` ranks runs, on each rank, once against its own
keys (two chunks of ``a = s / 2c`` tokens, causal) and ``c - 1`` times against a foreign rank's (``2a``
queries by ``a`` keys, or ``a`` by ``2a``: the same work). Kernels compute whole tiles, so short chunks cost
far more than their pairs say:

    own keys        tiles(2a, 2a), half of them skipped
    foreign keys    (c - 1) * tiles(2a, a)
    attention  =  calls * per_call  +  pairs in tiles * per_pair  +  tokens read * per_token

A micro-batch of several documents, on each of its ranks:

    seconds  =  attention  +  ring transfers that it does not hide  +  tokens / c * rest_per_token  +  fixed

All of it is for one layer, forward and backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdmoe.core.errors import ConfigError

TILE = 128
"""Rows and columns that a kernel computes at once."""


def tiled_pairs(num_queries: float, num_keys: float, *, causal: bool) -> float:
    """Pairs that a kernel computes of one segment: whole tiles, the upper right ones skipped if causal."""
    rows, columns = math.ceil(num_queries / TILE), math.ceil(num_keys / TILE)
    tiles = rows * columns - rows * (rows - 1) // 2 if causal else rows * columns
    return tiles * TILE * TILE


@dataclass(frozen=True)
class Timing:
    """One measured kernel call, forward and backward: its segments and its seconds."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    seconds: float

    def features(self) -> tuple[float, float, float]:
        """Calls, tiled pairs, tokens read."""
        pairs = sum(
            tiled_pairs(q, k, causal=self.causal) for q, k in zip(self.queries, self.keys, strict=True)
        )
        return 1.0, pairs, sum(self.queries) + sum(self.keys)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one layer. The defaults stand for 32 heads of 128 with 4 key-value heads and 8 of 128
    experts of width 768 behind a residual stream of 2048; the attention part is fitted to timings of an H200
    (``benchmarks/context_parallel.py --gpu``), for other shapes do so with :func:`fit_attention`."""

    per_call: float = 2.53e-4
    """Launching one attention call, its gathers and its merge."""
    per_pair: float = 1.82e-10
    """A query-key pair: 14 * heads * width FLOPs at 315 TFLOP/s."""
    per_token: float = 1.36e-8
    """A query or key that attention reads."""
    rest_per_token: float = 1.0e-6
    """Everything but attention, per token: projections, experts and their exchange, norms."""
    fixed: float = 2.0e-4
    """A micro-batch, however small: launches, and gathers of weights that nothing hides."""
    ring_bytes: float = 8192.0
    """Keys, values and their gradients, per token and hop, forward and backward together:
    ``sum(volume.sent_bytes("ring", shape of one token, 2))``."""
    near_bandwidth: float = 3.0e11
    """Bytes a second between ranks of one node."""
    far_bandwidth: float = 4.5e10
    """Bytes a second of one rank between nodes."""
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        bad = [name for name, value in vars(self).items() if not (math.isfinite(value) and value >= 0)]
        if bad or not (self.near_bandwidth and self.far_bandwidth and self.ranks_per_node):
            raise ConfigError(
                f"cost model: expected finite numbers, not negative, got {bad}; fit it to more timings"
            )

    def attention_seconds(self, length: int, size: int) -> float:
        """Attention of one document on each of ``size`` ranks, without launches (a micro-batch has those)."""
        half = length / (2 * size)
        pairs = tiled_pairs(2 * half, 2 * half, causal=True)
        tokens = 4 * half
        if size > 1:
            pairs += (size - 1) * tiled_pairs(2 * half, half, causal=False)
            tokens += (size - 1) * 3 * half
        return pairs * self.per_pair + tokens * self.per_token

    def micro_batch_seconds(
        self, attention: float | np.ndarray, num_tokens: float | np.ndarray, size: int | np.ndarray
    ) -> np.ndarray:
        """From the sums of :meth:`attention_seconds` and of tokens over its documents; takes arrays."""
        share = num_tokens / size
        bandwidth = np.where(np.asarray(size) > self.ranks_per_node, self.far_bandwidth, self.near_bandwidth)
        transfer = share * (size - 1) * self.ring_bytes / bandwidth
        busy = attention + size * self.per_call
        return self.fixed + np.maximum(busy, transfer) + share * self.rest_per_token


def fit_attention(model: CostModel, timings: Sequence[Timing]) -> tuple[CostModel, float]:
    """The model with its attention coefficients fitted, and the largest relative error of a timing.

    Least squares of *relative* errors, so that short calls count as much as long ones, with no coefficient
    below zero: of all subsets of the three, the best one whose solution is not negative.
    """
    if len(timings) < 3:
        raise ConfigError(
            f"cost model: expected at least 3 timings to fit 3 coefficients, got {len(timings)}"
        )
    seconds = np.array([timing.seconds for timing in timings])
    scaled = np.array([timing.features() for timing in timings]) / seconds[:, None]
    best, best_loss = np.zeros(3), math.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        solution = np.zeros(3)
        solution[list(kept)] = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)[0]
        loss = float(((scaled @ solution - 1) ** 2).sum())
        if (solution >= 0).all() and loss < best_loss:
            best, best_loss = solution, loss
    per_call, per_pair, per_token = (float(x) for x in best)
    fitted = dataclasses.replace(model, per_call=per_call, per_pair=per_pair, per_token=per_token)
    return fitted, float(np.abs(scaled @ best - 1).max())
