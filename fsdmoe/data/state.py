"""The saved position: what it holds, what it was measured against, and what to do when that has changed.

    {"version": 2, "steps": 120,
     "order": {"seed": 7, "shuffle": true, "piece_len": 16384, "cursors": 64},
     "holdout": 0.01,
     "sources": [{"name": "web", "fingerprint": "...", "weight": 0.7, "chunks": 5210, "tokens": 190412,
                  "earlier": 0}, ...],
     "open": [[0, 5101, 812], null, ...],    a cursor each: source, place in its endless list, next token
     "next_cursor": 17}

Its size depends on the number of sources and cursors and on nothing else. Version 1 had other names for the
same numbers and is read too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.cursors import Position, open_cursor
from fsdmoe.data.order import ChunkOrder, Progress

_VERSION = 2


@dataclass(frozen=True)
class OrderSettings:
    """What fixes the order of a given data set. A saved position is only meaningful with its own settings."""

    seed: int
    shuffle: bool
    piece_len: int
    cursors: int


@dataclass(frozen=True)
class Description:
    """Everything that the stream depends on, the position aside."""

    order: OrderSettings
    holdout: float
    names: tuple[str, ...]
    fingerprints: tuple[str, ...]
    weights: tuple[float, ...]


def fingerprint(description: Description) -> str:
    """One short name for a data set in an order."""
    return hashlib.blake2b(json.dumps(asdict(description)).encode(), digest_size=16).hexdigest()


def to_dict(position: Position, description: Description, steps: int) -> dict[str, Any]:
    """A position with what it was measured against."""
    columns = (description.names, description.fingerprints, description.weights, position.progress)
    sources = [
        {"name": name, "fingerprint": content, "weight": weight, **asdict(p)}
        for name, content, weight, p in zip(*columns, strict=True)
    ]
    return {
        "version": _VERSION,
        "steps": steps,
        "order": asdict(description.order),
        "holdout": description.holdout,
        "sources": sources,
        "open": [None if c is None else [c.source, c.place, c.offset] for c in position.cursors],
        "next_cursor": position.next_cursor,
    }


def current_version(state: dict[str, Any]) -> dict[str, Any]:
    """A saved position under today's names."""
    if state.get("version") == _VERSION:
        return state
    if state.get("version") != 1:
        raise ConfigError(
            f"data: expected a saved position of version 1 or {_VERSION}, got {state.get('version')!r}; "
            "resume with the release that wrote the checkpoint"
        )
    return {
        "version": _VERSION,
        "steps": state["steps"],
        "order": _renamed(state["order"], "lanes", "cursors"),
        "holdout": state["holdout"],
        "sources": [_renamed(source, "units", "chunks") for source in state["sources"]],
        "open": state["open"],
        "next_cursor": state["next_lane"],
    }


def _renamed(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in values.items()}


def saved_settings(state: dict[str, Any]) -> OrderSettings:
    """The order that a position was saved under."""
    return OrderSettings(**state["order"])


def mismatch(state: dict[str, Any], description: Description, *, goes_on: bool) -> str | None:
    """What differs between a saved position and a data set, in one line, and what to do about it, or, with
    `goes_on`, what is done (:func:`from_dict`); None when they belong together.

    `description` holds the settings that the user asked for; those left to us are taken from the saved
    position.
    """
    before, after = asdict(saved_settings(state)), asdict(description.order)
    pairs = [(key, before[key], after[key]) for key in before] + [
        ("holdout", state["holdout"], description.holdout)
    ]
    changes = [f"{key} was {old} and is {new}" for key, old, new in pairs if old != new]
    contents = [source["fingerprint"] for source in state["sources"]]
    gone = [s["name"] for s in state["sources"] if s["fingerprint"] not in description.fingerprints]
    columns = (description.names, description.fingerprints)
    new = [name for name, content in zip(*columns, strict=True) if content not in contents]
    if gone:
        changes.append(f"no source has the content that {', '.join(gone)} had")
    if new:
        changes.append(f"{', '.join(new)} has other content or is new")
    if not gone and not new and contents != list(description.fingerprints):
        changes.append("the sources stand in another order")
    weights = [source["weight"] for source in state["sources"]]
    if contents == list(description.fingerprints) and weights != list(description.weights):
        changes.append(f"weights were {weights} and are {list(description.weights)}")
    if not changes:
        return None
    text = f"data: the saved position belongs to another data set or order: {'; '.join(changes)}"
    if not goes_on:
        return (
            f'{text}; restore the section, or set data.on_change = "continue" to go on with the sources that '
            "are still there"
        )
    kept = [name for name, content in zip(*columns, strict=True) if content in contents]
    places = {"from the beginning": new, "at the saved position": kept}
    told = [f"{', '.join(names)} {where}" for where, names in places.items() if names]
    return f'{text}; data.on_change = "continue", so it goes on with {"; ".join(told)}'


def from_dict(state: dict[str, Any], description: Description, order: ChunkOrder) -> Position:
    """The position in `order`, which must have the saved settings.

    Sources are found again by content, wherever they stand now; new ones begin at their first document. The
    clocks of the mixture go on only if the mixture is the same: under other weights they begin together at
    zero, since a source whose weight was raised would otherwise be read alone until it had caught up.
    """
    old = state["sources"]
    matches = _match([source["fingerprint"] for source in old], list(description.fingerprints))
    same = matches == list(range(len(old))) and [s["weight"] for s in old] == list(description.weights)
    progress = tuple(Progress() if i is None else _progress(old[i], same_clock=same) for i in matches)
    cursors = tuple(
        open_cursor(order, matches.index(entry[0]), int(entry[1]), int(entry[2]))
        if entry is not None and entry[0] in matches
        else None
        for entry in state["open"]
    )
    return Position(progress, cursors, int(state["next_cursor"]))


def _progress(source: dict[str, Any], *, same_clock: bool) -> Progress:
    """That of a saved source. What was drawn by an earlier clock counts as read."""
    chunks, tokens, earlier = (int(source.get(key, 0)) for key in ("chunks", "tokens", "earlier"))
    return Progress(chunks, tokens, earlier) if same_clock else Progress(chunks, 0, earlier + tokens)


def _match(before: list[str], after: list[str]) -> list[int | None]:
    """For each source now, the index of an equal one before, each used once."""
    left: dict[str, list[int]] = {}
    for index, content in enumerate(before):
        left.setdefault(content, []).append(index)
    return [left[content].pop(0) if left.get(content) else None for content in after]
