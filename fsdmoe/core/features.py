"""Features of a run, and rows that say what two of them do together.

The rows are in one table, :mod:`fsdmoe.config.compatibility`. The few that a lower part needs too, for people
who build it by hand, stand next to that part and are listed there.

A row that refuses makes one line, always in the same form::

    KEY: REASON, got OTHER KEY = VALUE; set OTHER KEY = ..., or KEY = ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fsdmoe.core.errors import refuse

Verdict = Literal["right, tested", "refused: cannot", "refused: not built"]
RIGHT: Verdict = "right, tested"
CANNOT: Verdict = "refused: cannot"
NOT_BUILT: Verdict = "refused: not built"


class Chosen(Protocol):
    """What somebody chose, by dotted key: a dict, or a whole configuration."""

    def __getitem__(self, key: str, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """Something that a run may use, and the key that switches it on."""

    name: str
    """For readers of the documentation."""
    key: str
    """The dotted key that a refusal names."""
    shown: str
    """The values of the key that switch it on, as the documentation shows them."""
    off: str | Callable[[Chosen], str]
    """A value of the key without it, as TOML has it."""
    is_on: Callable[[Chosen], bool]

    @property
    def section(self) -> str:
        """Of its key."""
        return self.key.partition(".")[0]

    @property
    def setting(self) -> str:
        """The key and its values, for readers."""
        is_value = self.shown.startswith(('"', "[", "true", "false"))
        return f"{self.key} = {self.shown}" if is_value else f"{self.key}: {self.shown}"

    def switch_off(self, chosen: Chosen) -> str:
        """What to write instead."""
        return f"{self.key} = {self.off if isinstance(self.off, str) else self.off(chosen)}"


@dataclass(frozen=True, eq=False)
class Row:
    """Two features, whether they go together, and why not."""

    feature: Feature
    other: Feature
    verdict: Verdict
    reason: str
    """Why they do not go together; of a pair that does, the test that shows it."""
    fix: str = ""
    """What to do about ``other``; without it: set its key to a value without it."""

    @property
    def is_refused(self) -> bool:
        return self.verdict != RIGHT

    def applies(self, chosen: Chosen) -> bool:
        """Whether both are on."""
        return self.feature.is_on(chosen) and self.other.is_on(chosen)

    def problem(self, chosen: Chosen) -> str:
        """The line for somebody who chose both."""
        fix = self.fix or f"set {self.other.switch_off(chosen)}"
        return (
            f"{self.feature.key}: {self.reason}, got {self.other.key} = {_written(chosen[self.other.key])}; "
            f"{fix}, or {self.feature.switch_off(chosen)}"
        )


def refused_rows(rows: Iterable[Row], chosen: Chosen) -> list[Row]:
    """Those that refuse what somebody chose."""
    return [row for row in rows if row.is_refused and row.applies(chosen)]


def refuse_together(rows: Iterable[Row], chosen: Chosen) -> None:
    """Raise a :class:`ConfigError` with a line for each row that refuses what somebody chose."""
    refuse([row.problem(chosen) for row in refused_rows(rows, chosen)])


def switch(name: str, key: str) -> Feature:
    """A feature whose key is true or false."""
    return Feature(name=name, key=key, shown="true", off="false", is_on=lambda chosen: bool(chosen[key]))


def choice(name: str, key: str, value: str, off: str) -> Feature:
    """A feature that is one value of a key."""
    return Feature(
        name=name, key=key, shown=f'"{value}"', off=f'"{off}"', is_on=lambda chosen: chosen[key] == value
    )


def above(name: str, key: str, least: int = 1) -> Feature:
    """A feature whose key is a number above the ``least``."""
    return Feature(
        name=name, key=key, shown=f"above {least}", off=str(least), is_on=lambda chosen: chosen[key] > least
    )


def _written(value: object) -> str:
    """As in TOML."""
    if dataclasses.is_dataclass(value):
        return "another than the default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    if value is None:
        return '"none"'
    return f'"{value}"' if isinstance(value, str) else str(value)
