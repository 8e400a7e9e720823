"""Rotary positions in a config.json, both spellings, read as transformers reads them.

=====================  ======================================================================================
``rope_scaling``       until transformers 4, with ``rope_theta`` next to it; where it is stated, it is the one
                       that transformers 5 takes too
``rope_parameters``    since transformers 5, with ``rope_theta`` (and ``partial_rotary_factor``) inside
=====================  ======================================================================================

Both are written: what reads only one of them finds the same in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.errors import ConfigError
from fsdmoe.models.rope_config import PLAIN_ROPE, RopeConfig

SPELLINGS = ("rope_scaling", "rope_parameters")
_BESIDE = {"rope_theta", "partial_rotary_factor"}
_KEYS = {field.name for field in dataclasses.fields(RopeConfig)} - {"type"}
# What says nothing, in tables of any kind
_NEUTRAL = {"factor": 1, "attention_factor": 1}


class HFRope(NamedTuple):
    """What a config.json says; none where it says nothing."""

    rope: RopeConfig
    theta: float | None
    partial: float | None
    problems: list[str]
    """Why the rest is of no use; a line a key."""


def read_rope(config: Mapping[str, Any]) -> HFRope:
    """Scaling, base and rotated part, from wherever they stand."""
    tables, problems = {}, []
    for name in SPELLINGS:
        stated = config.get(name)
        if isinstance(stated, dict):
            tables[name] = {key: value for key, value in stated.items() if value is not None}
        elif stated is not None:
            problems.append(f"{name}: expected an object, got {stated!r}")
    used = next((name for name in SPELLINGS if tables.get(name)), SPELLINGS[1])
    rope, found = _scaling(used, tables.get(used, {}))
    problems += found
    for key in sorted(_BESIDE):
        problems += _disagreement(key, config, tables, used)
    theta, partial = (
        _first(key, config, tables.get(used, {})) for key in ("rope_theta", "partial_rotary_factor")
    )
    return HFRope(rope, theta, partial, problems)


def write_rope(fields: Mapping[str, Any]) -> Tree:
    """The keys of a config.json for the fields of a ``ModelConfig``; those of an earlier version have no
    scaling."""
    stated = {key: value for key, value in (fields.get("rope") or {}).items() if value is not None}
    kind = stated.pop("type", "default")
    theta, partial = fields["rope_theta"], fields.get("partial_rotary_factor", 1.0)
    # Left out, it means one half to glm4_moe, and one to all others.
    says_part = partial != 1 or fields.get("architecture") == "glm4_moe"
    beside = {"partial_rotary_factor": partial} if says_part else {}
    config: Tree = {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | beside | stated}
    config |= {"rope_theta": theta} | beside
    if kind != "default":
        config["rope_scaling"] = {"rope_type": kind, "type": kind} | stated
    return config


def _scaling(name: str, table: Mapping[str, Any]) -> tuple[RopeConfig, list[str]]:
    kinds = {table[key] for key in ("rope_type", "type") if isinstance(table.get(key), str)}
    if len(kinds) > 1:
        return PLAIN_ROPE, [f"{name}.rope_type: expected the same as type, got {sorted(kinds)}"]
    kind: Any = next(iter(kinds), "default")
    stated = {key: value for key, value in table.items() if key not in {"rope_type", "type"} | _BESIDE}
    if kind == "default":
        stated = {key: value for key, value in stated.items() if value != _NEUTRAL.get(key)}
    problems = [
        f"{name}.{key}: not known to the native decoder, got {value!r}"
        for key, value in stated.items()
        if key not in _KEYS or not _is_sound(key, value)
    ]
    if problems:
        return PLAIN_ROPE, problems
    lists = {key: tuple(value) for key, value in stated.items() if isinstance(value, list)}
    try:
        return RopeConfig(type=kind, **stated | lists), []
    except ConfigError as error:
        return PLAIN_ROPE, [line.replace("model.rope", name, 1) for line in error.problems]


def _is_sound(key: str, value: Any) -> bool:
    """Whether the value is of the kind that the key has."""
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(_is_number(each) for each in value)
    return isinstance(value, bool) if key == "truncate" else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _first(key: str, config: Mapping[str, Any], table: Mapping[str, Any]) -> float | None:
    value = table.get(key, config.get(key))
    return float(value) if _is_number(value) else None


def _disagreement(key: str, config: Mapping[str, Any], tables: Mapping[str, Tree], used: str) -> list[str]:
    """Stated differently in several places, or only in the table that transformers passes over."""
    stated = [place.get(key) for place in (config, *tables.values())]
    values = [value for value in stated if value is not None]
    if not all(_is_number(value) for value in values):
        return [f"{key}: expected a number, got {values!r}"]
    if len({float(value) for value in values}) > 1:
        what = "base" if key == "rope_theta" else "value"
        return [f"{key}: expected one {what}, got {sorted(map(float, values))} in several places"]
    if values and config.get(key) is None and tables.get(used, {}).get(key) is None:
        return [f"{key}: expected next to {used}, got it in a table that transformers passes over then"]
    return []
