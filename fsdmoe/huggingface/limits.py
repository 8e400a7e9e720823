"""What the configuration of a Hugging Face model asks of attention that rows split over ranks cannot give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fsdmoe.checkpoint.hf_rope import read_rope
from fsdmoe.huggingface.rotary import FOLLOW_LENGTH

WHOLE_ROWS = ("mesh.cp = 1", "mesh.tp = 1")

# Families whose every layer has attention sinks, which no key of their configuration shows.
_WITH_SINKS = ("gpt_oss",)
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def attention_limits(config: Any, seq_len: int, fixes: Sequence[str] = WHOLE_ROWS) -> list[str]:
    """One line for every finding, for rows of ``seq_len`` tokens. ``fixes`` are the settings that would leave
    attention to the model; the first names the key that the lines begin with. What a configuration does not
    show is refused when a layer first asks for it (:mod:`fsdmoe.huggingface.attention`)."""
    key = fixes[0].partition(" = ")[0]
    return [
        f"{key}: {line}, or set {' and '.join(fixes)}" for line in _findings(text_config(config), seq_len)
    ]


def text_config(config: Any) -> Any:
    """That of the language model, where there are others next to it."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def shortest_window(config: Any) -> int | None:
    """Of what a token attends to, by any key; None without one."""
    sizes = (getattr(text_config(config), key, None) for key in _WINDOWS.values())
    return min((size for size in sizes if size is not None), default=None)


def _findings(config: Any, seq_len: int) -> Iterator[str]:
    family = getattr(config, "model_type", "")
    if family in _WITH_SINKS:
        yield (
            f"expected attention without sinks, got {family}: all its layers have them; train it as fsdmoe's "
            "own decoder (from-hf, model.preset: docs/gpt_oss.md)"
        )
        return
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind in sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"}):
        yield f"expected full_attention in the model's layer_types, got {kind}; take another model"
    for kind, key in _WINDOWS.items():
        size = getattr(config, key, None)
        is_used = kind in kinds if kinds else key == "sliding_window"
        if is_used and size is not None and size < seq_len and getattr(config, f"use_{key}", True):
            yield (
                f"expected attention to whole rows of data.seq_len = {seq_len} tokens, got {key} = {size} in "
                f"the model's configuration; choose data.seq_len of at most {size}, switch it off"
            )
    for key in ("attn_logit_softcapping", "attn_temperature_tuning"):
        if getattr(config, key, None):
            yield f"expected no {key} in the model's configuration, got {getattr(config, key)}; switch it off"
    if getattr(config, "attention_dropout", None):
        yield (
            f"expected attention_dropout = 0 in the model's configuration, got {config.attention_dropout}; "
            "switch it off"
        )
    yield from _rope_findings(config)


def _rope_findings(config: Any) -> Iterator[str]:
    """Frequencies that follow the length of a text, in a form that is not known here."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # by kind of layer
    for table in (rope, *nested):
        kind = table.get("rope_type", "default")
        problems = (
            ["rope_parameters: by kind of layer"]
            if nested
            else read_rope({"rope_parameters": table}).problems
        )
        if kind in FOLLOW_LENGTH and problems:
            yield (
                f"expected rotary frequencies that do not depend on the rows, got rope_type = {kind}, whose "
                f"form here is not known ({problems[0]}); choose linear, yarn or llama3"
            )
