"""Rotary frequencies of every kind of scaling, and the two factors that come with some of them.

A kind of scaling is a table of frequencies, a factor on cos and sin, and (DeepSeek) a factor on the softmax
scale: the rotation itself is the same for all of them. At position 100,000 the last bit of a frequency is
worth a hundredth of a radian, so frequencies are computed by the same steps as in transformers, in fp32 and
on the host.

``dynamic`` and ``longrope`` follow the length of a text. That is each document's own length, whichever
others share its row, its micro-batch or its ranks: so a packed document gets what it would get alone, and
the layout of ranks changes nothing.

Shape suffixes: B rows, S tokens, P rotary pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdmoe.models.rope_config import PLAIN_ROPE, RopeConfig


@dataclass(frozen=True)
class RotaryPositions:
    """The positions of one model: tables of cos and sin for any tokens of it."""

    dim: int
    """Width of a head that is rotated: twice the pairs."""
    theta: float
    rope: RopeConfig = PLAIN_ROPE
    max_position_embeddings: int = 32_768

    def lengths(self, positions_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor | None:
        """The length of every token's document, where frequencies depend on it. Wants whole rows."""
        return document_reach(positions_BS, document_ids_BS) if self.rope.depends_on_length else None

    def tables(self, positions_BS: Tensor, lengths_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B, S, P]`` in fp32, of any tokens; ``lengths`` of the same tokens."""
        angles_BSP = positions_BS[..., None].float() * self._frequencies(positions_BS.device, lengths_BS)
        cos_BSP, sin_BSP = angles_BSP.cos(), angles_BSP.sin()
        factor = self.attention_factor
        return (cos_BSP, sin_BSP) if factor == 1.0 else (cos_BSP * factor, sin_BSP * factor)

    @property
    def attention_factor(self) -> float:
        """On cos and sin alike, so on products of queries and keys twice."""
        rope = self._rope
        if rope.attention_factor is not None:
            return rope.attention_factor
        if rope.type == "yarn":
            if rope.mscale and rope.mscale_all_dim:
                return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
            return _mscale(rope.factor, 1.0)
        if rope.type == "longrope" and rope.factor > 1:
            return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
        return 1.0

    @property
    def softmax_factor(self) -> float:
        """On the softmax scale of latent attention (DeepSeek), which also sharpens what is not rotated."""
        if self.rope.type != "yarn" or not self.rope.mscale_all_dim:
            return 1.0
        return _mscale(self._rope.factor, self.rope.mscale_all_dim) ** 2

    @cached_property
    def _rope(self) -> Any:
        """Resolved, so every key that its type reads has a value, which ``RopeConfig`` itself cannot say."""
        return self.rope.resolved(self.max_position_embeddings)

    def _frequencies(self, device: torch.device, lengths_BS: Tensor | None) -> Tensor:
        """Radians a position, ``[P]``, or ``[B, S, P]`` where they depend on lengths."""
        rope = self._rope
        if rope.type == "dynamic":
            assert lengths_BS is not None
            return self._dynamic(lengths_BS)
        tables = self._kept.get(device)
        if tables is None:
            tables = tuple(table.to(device, non_blocking=True) for table in self._on_host())
            if not isinstance(tables[0], FakeTensor):
                self._kept[device] = tables
        if rope.type == "longrope":
            assert lengths_BS is not None
            short_P, long_P = tables
            return torch.where(lengths_BS[..., None] > rope.original_max_position_embeddings, long_P, short_P)
        return tables[0]

    @cached_property
    def _kept(self) -> dict[torch.device, tuple[Tensor, ...]]:
        """Frequencies by device: moved once, since a copy from the host cannot be part of a CUDA graph."""
        return {}

    def _on_host(self) -> tuple[Tensor, ...]:
        """Frequencies ``[P]``; of ``longrope`` those of short and of long documents."""
        rope = self._rope
        if rope.type == "longrope":
            factors = torch.tensor((rope.short_factor, rope.long_factor), dtype=torch.float32, device="cpu")
            return tuple(1.0 / (factor_P * self._wavelengths()) for factor_P in factors)
        if rope.type == "yarn":
            return (self._yarn(),)
        frequencies_P = 1.0 / self._wavelengths()
        if rope.type == "linear":
            frequencies_P = frequencies_P / rope.factor
        elif rope.type == "llama3":
            frequencies_P = self._llama3(frequencies_P)
        return (frequencies_P,)

    def _exponents(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim

    def _wavelengths(self) -> Tensor:
        """Positions a radian, without scaling."""
        return self.theta ** self._exponents()

    def _dynamic(self, lengths_BS: Tensor) -> Tensor:
        """A base that grows with the part of a document beyond the trained length."""
        factor, trained = self._rope.factor, self.max_position_embeddings
        reach_BS = factor * lengths_BS.clamp(min=trained).float() / trained - (factor - 1)
        # In fp64: the same to the last bit for all tokens of a document, wherever in a vector they stand.
        growth_BS = (reach_BS.double() ** (self.dim / (self.dim - 2))).float()
        return 1.0 / (self.theta * growth_BS[..., None]) ** self._exponents(lengths_BS.device)

    def _yarn(self) -> Tensor:
        """Fast frequencies as they are, slow ones divided by the factor, a ramp between the two."""
        rope = self._rope
        low, high = self._pair_with_turns(rope.beta_fast), self._pair_with_turns(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        pairs_P = torch.arange(self.dim // 2, dtype=torch.float32, device="cpu")
        kept_P = 1 - ((pairs_P - low) / (high - low)).clamp(0, 1)
        wavelengths_P = self._wavelengths()
        return 1.0 / (rope.factor * wavelengths_P) * (1 - kept_P) + 1.0 / wavelengths_P * kept_P

    def _pair_with_turns(self, turns: float) -> float:
        """The pair, as a fraction, that turns so many times over the trained length."""
        trained = self._rope.original_max_position_embeddings
        return self.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def _llama3(self, frequencies_P: Tensor) -> Tensor:
        """Short wavelengths as they are, long ones divided by the factor, smoothly between the two."""
        rope = self._rope
        trained = rope.original_max_position_embeddings
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        wavelengths_P = 2 * math.pi / frequencies_P
        smooth_P = (trained / wavelengths_P - low) / (high - low)
        between_P = (1 - smooth_P) * frequencies_P / rope.factor + smooth_P * frequencies_P
        is_long_P, is_short_P = wavelengths_P > trained / low, wavelengths_P < trained / high
        scaled_P = torch.where(is_long_P, frequencies_P / rope.factor, frequencies_P)
        return torch.where(is_long_P | is_short_P, scaled_P, between_P)


def document_reach(positions_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor:
    """The number of positions up to the last one of every token's document, ``[B, S]``; without ids a row is
    one document. A document is a range of equal ids."""
    if document_ids_BS is None:
        return (positions_BS.amax(1, keepdim=True) + 1).expand_as(positions_BS)
    starts_BS = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    document_BS = F.pad(starts_BS.cumsum(1), (1, 0))
    reach_BS = torch.zeros_like(positions_BS).scatter_reduce(1, document_BS, positions_BS + 1, "amax")
    return reach_BS.gather(1, document_BS)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
