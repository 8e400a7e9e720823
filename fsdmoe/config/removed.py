"""Keys that earlier versions had, and what is said to a file or a command line that still has them.

A configuration that an earlier version printed has a line for every key. A line that left the removed feature
off asks for nothing: it is passed over. Any other value is refused, with what to write instead or the reason.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from fsdmoe.config.values import Problems


class Removed(NamedTuple):
    """A row of the table."""

    off: str
    """The value that left the feature off, in lower case."""
    answer: str
    """What follows the key in the message; ``{value}`` stands for the value that was written."""


def _no_longer_there(reason: str) -> str:
    return f"no longer there: {reason} (docs/results/removed.md); delete the line"


REMOVED = {
    "train.recompute": Removed(
        "none", 'is memory.recompute now, a list of parts; write memory.recompute = ["{value}"]'
    ),
    "train.compile": Removed("false", _no_longer_there("fused kernels are faster")),
    "data.chat_format": Removed(
        "<|im_start|>{role}\n{content}<|im_end|>\n",
        "is data.chat_template now, a Jinja file; delete the line to use the tokenizer's own template",
    ),
    "tensor_parallel.overlap": Removed("none", _no_longer_there("one collective is faster than a ring")),
    "precision.delayed_scales": Removed("false", _no_longer_there("they did not make a step faster")),
    "fsdp.across_nodes": Removed("flat", _no_longer_there("one collective is as fast as two stages")),
}
"""By the dotted key."""


def without_removed_keys(
    mapping: Mapping[str, Any], sections: Container[str], problems: Problems
) -> dict[str, Any]:
    """The tables of a file without removed keys, and without empty sections that had no other keys."""
    kept: dict[str, Any] = {}
    for section, table in mapping.items():
        if not isinstance(table, dict):
            kept[section] = table
            continue
        written = {f"{section}.{key}": value for key, value in table.items()}
        rest = {key: value for key, value in table.items() if f"{section}.{key}" not in REMOVED}
        _refuse_used(written, problems)
        is_gone = section not in sections and any(key.startswith(f"{section}.") for key in REMOVED)
        if rest or not is_gone:
            kept[section] = rest
    return kept


def without_removed_options(overrides: Mapping[str, str | None], problems: Problems) -> dict[str, str | None]:
    """The options of a command line without removed keys."""
    _refuse_used({key: True if text is None else text for key, text in overrides.items()}, problems)
    return {key: text for key, text in overrides.items() if key not in REMOVED}


def _refuse_used(written: Mapping[str, Any], problems: Problems) -> None:
    """A line for each removed key that asks for what is no longer there."""
    for key, value in written.items():
        row = REMOVED.get(key)
        if row is not None and str(value).lower() != row.off:
            problems.append(f"{key}: {row.answer.format(value=value)}")
