"""Ranks ask each other, with bytes and numbers only: no message is unpickled.

Which groups there are, which exchange runs and how many bytes travel must be the same on all ranks. So none
of it may follow from what a rank finds for itself: its environment, its GPU, its packages, its files. What
does is asked of all ranks once, when it is built (:func:`from_all_ranks`), or must be the same on all of
them (:func:`require_alike`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import ranges_text

_LENGTH_BYTES = 8
_HEAD_BYTES = 248
"""Of a message that travel with its length."""
_MOST_PROBLEMS = 8
_LONGEST = 120


class _Absent:
    """Stands for a fact that a rank does not have."""

    def __repr__(self) -> str:
        return "absent"


def message_device() -> torch.device:
    """Host memory where a host backend is at hand (gloo), else this rank's GPU, if it has one."""
    on_host = torch.device("cpu") in dist.group.WORLD._device_types  # type: ignore[union-attr]
    on_host = on_host or not torch.cuda.is_available()
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's ``value`` (JSON), by rank. Collective: once where all are short, else twice."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1 or dist.get_backend() == "fake":  # in a world that is made up there is nobody to ask
        return [value] * num_ranks
    data = json.dumps(value).encode()
    heads = _gather(len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_HEAD_BYTES], num_ranks)
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    found = [head[_LENGTH_BYTES:] for head in heads]
    if max(lengths) > _HEAD_BYTES:
        rests = _gather(data[_HEAD_BYTES:], num_ranks, max(lengths) - _HEAD_BYTES)
        found = [head + rest for head, rest in zip(found, rests, strict=True)]
    return [json.loads(each[:length]) for each, length in zip(found, lengths, strict=True)]


def _gather(data: bytes, num_ranks: int, size: int = _LENGTH_BYTES + _HEAD_BYTES) -> list[bytes]:
    """``size`` bytes of every rank, padded with zeros."""
    device = message_device()
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    found = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(found, own)
    return [bytes(each.cpu().numpy()) for each in found]


def require_alike(facts: Mapping[str, Any], fix: str) -> None:
    """Refuse facts that are not the same on all ranks, with the same words on all of them. Collective.

    Args:
        facts: JSON values by the name that the message shall give them.
        fix: What to do about it.

    Raises:
        ConfigError: Names each fact that differs, its values, and the ranks that have them.
    """
    told = json.dumps(dict(facts), sort_keys=True)
    digests = from_all_ranks(hashlib.blake2b(told.encode(), digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    found: list[dict[str, Any]] = from_all_ranks(dict(facts))
    names = dict.fromkeys(name for each in found for name in each)
    absent = _Absent()
    values = {name: [each.get(name, absent) for each in found] for name in names}
    differing = {name: row for name, row in values.items() if any(value != row[0] for value in row)}
    problems = [
        f"{name}: expected the same on all ranks, got {by_rank(row)}; {fix}"
        for name, row in differing.items()
    ]
    raise ConfigError(*problems[:_MOST_PROBLEMS])


def by_rank(values: Sequence[Any]) -> str:
    """Which ranks have which of some values, in words: ``2 on ranks 0-1, 4 on rank 2``."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(_shortened(repr(value)), []).append(rank)
    return ", ".join(f"{text} on {_ranks(ranks)}" for text, ranks in holders.items())


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges_text(ranks, ', ')}"
