"""The ``model.rope`` section: how rotary frequencies are scaled for texts longer than a model was trained on.

Keys have transformers' names (``rope_scaling`` and ``rope_parameters`` of a config.json). A key that is none
has not been stated; :meth:`RopeConfig.resolved` says what it means then. What is computed from them is in
:mod:`fsdmoe.models.rope_scaling`.

========  ==================================================  ===============================================
type      must have                                           may have
========  ==================================================  ===============================================
default
linear    factor
dynamic   factor
yarn      factor                                              original_max_position_embeddings, beta_fast,
                                                              beta_slow, truncate, mscale, mscale_all_dim,
                                                              attention_factor
llama3    factor, low_freq_factor, high_freq_factor           original_max_position_embeddings
longrope  short_factor, long_factor                           factor, original_max_position_embeddings,
                                                              attention_factor
========  ==================================================  ===============================================
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: dict[RopeType, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
_OPTIONAL: dict[RopeType, tuple[str, ...]] = {
    "yarn": (
        _ORIGINAL, "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor",
    ),
    "llama3": (_ORIGINAL,),
    "longrope": ("factor", _ORIGINAL, "attention_factor"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Scaling of the rotary frequencies; ``type`` decides which of the other keys it reads."""

    type: RopeType = "default"
    """How frequencies are scaled: default (not at all), linear, dynamic, yarn, llama3 or longrope. dynamic
    and longrope follow the length of each document."""
    factor: float | None = None
    """How many times longer texts are than the model was trained on; longrope takes none for
    max_position_embeddings / original_max_position_embeddings."""
    original_max_position_embeddings: int | None = None
    """yarn, llama3, longrope: the length that the model was trained on before; none is
    model.max_position_embeddings. (dynamic always reads that one.)"""
    attention_factor: float | None = None
    """yarn, longrope: factor on cos and sin, which sharpens attention; none computes it from factor."""
    beta_fast: float | None = None
    """yarn: frequencies with at least so many turns over the trained length are kept; none is 32."""
    beta_slow: float | None = None
    """yarn: frequencies with at most so many turns over the trained length are divided by factor; none is
    1."""
    truncate: bool | None = None
    """yarn: round the two bounds to whole pairs; none is true."""
    mscale: float | None = None
    """yarn (DeepSeek): weight of log(factor) in the factor on cos and sin, relative to mscale_all_dim."""
    mscale_all_dim: float | None = None
    """yarn (DeepSeek): weight of log(factor) in the softmax scale of latent attention, and of what the
    factor on cos and sin is divided by."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original_max_position_embeddings / this are scaled by factor."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original_max_position_embeddings / this are kept."""
    short_factor: tuple[float, ...] | None = None
    """longrope: a divisor a frequency, for documents up to original_max_position_embeddings."""
    long_factor: tuple[float, ...] | None = None
    """longrope: a divisor a frequency, for longer documents."""

    def __post_init__(self) -> None:
        refuse(list(self._problems()))

    @property
    def stated(self) -> dict[str, Any]:
        """The keys that have a value, the type aside."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "type"}
        return {key: value for key, value in found.items() if value is not None}

    @functools.cached_property
    def depends_on_length(self) -> bool:
        """Whether frequencies follow the length of each document."""
        return self.type in ("dynamic", "longrope")

    def resolved(self, max_position_embeddings: int) -> RopeConfig:
        """With what the keys that were not stated mean."""
        implied: dict[str, Any] = {}
        if _ORIGINAL in _OPTIONAL.get(self.type, ()):
            implied[_ORIGINAL] = max_position_embeddings
        if self.type == "yarn":
            implied |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
        if self.type == "longrope":
            original = self.original_max_position_embeddings or max_position_embeddings
            implied["factor"] = max(1.0, max_position_embeddings / original)
        return replace(self, **implied | self.stated)

    def _problems(self) -> Iterator[str]:
        if self.type not in _REQUIRED:
            yield f"model.rope.type: expected one of {', '.join(_REQUIRED)}, got {self.type!r}; choose one"
            return
        required, stated = _REQUIRED[self.type], self.stated
        known = (*required, *_OPTIONAL.get(self.type, ()))
        for key in required:
            if key not in stated:
                yield f"model.rope.{key}: expected a value for rope.type = {self.type}, got none; add it"
        for key in stated:
            if key not in known:
                other = f"one of {', '.join(known)}" if known else "no other key"
                yield (
                    f"model.rope.{key}: expected {other} with rope.type = {self.type}, got "
                    f"{stated[key]!r}; drop it, or choose the type that reads it"
                )
        yield from self._range_problems(stated)

    def _range_problems(self, stated: dict[str, Any]) -> Iterator[str]:
        lowest = {"factor": 1, _ORIGINAL: 2, "mscale": 0, "mscale_all_dim": 0}
        above_zero = ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
        yield from at_least("model.rope", stated, {key: lowest[key] for key in lowest if key in stated})
        for key in above_zero:
            if key in stated and not stated[key] > 0:
                yield f"model.rope.{key}: expected a number above 0, got {stated[key]}; raise it"
        for key in ("short_factor", "long_factor"):
            if key in stated and not all(value > 0 for value in stated[key]):
                yield f"model.rope.{key}: expected numbers above 0, got {list(stated[key])}; correct them"
        fast, slow = stated.get("beta_fast", 32.0), stated.get("beta_slow", 1.0)
        if not fast > slow:
            yield f"model.rope.beta_fast: expected more than beta_slow = {slow}, got {fast}; raise it"
        long, short = stated.get("low_freq_factor"), stated.get("high_freq_factor")
        if long is not None and short is not None and not short > long:
            yield (
                f"model.rope.high_freq_factor: expected more than low_freq_factor = {long}, got {short}; "
                "raise it"
            )


PLAIN_ROPE = RopeConfig()
"""No scaling."""
