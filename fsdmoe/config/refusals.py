"""What does not go with the value of a key, refused in one form: by its own key, with the reason and both
ways out."""

from __future__ import annotations

from collections.abc import Iterator

from fsdmoe.errors import ConfigError

Found = Iterator[tuple[str, object, str, str]]
"""A key, its value, the value that would do, as TOML has it, and why."""


def refuse(key: str, off: str, found: Found) -> None:
    """Raise a :class:`ConfigError` of all that was ``found``; ``off``: the value of ``key`` that goes with
    everything."""
    problems = [
        f"{key}: {why}, got {other} = {_written(value)}; set {other} = {fix}, or {key} = {off}"
        for other, value, fix, why in found
    ]
    if problems:
        raise ConfigError(*problems)


def _written(value: object) -> str:
    """As in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
