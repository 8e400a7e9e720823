"""Ranks ask each other, with bytes and numbers only: no message is unpickled.

Which groups there are, which exchange runs and how many bytes travel must be the same on all ranks. So none
of it may follow from what a rank finds for itself: its environment, its GPU, its packages, its files. What
does is asked of all ranks once, when it is built (:func:`from_all_ranks`), or must be the same on all of
them (:func:`require_alike`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.errors import ConfigError

_MOST_PROBLEMS = 8
_LONGEST = 80


def message_device() -> torch.device:
    """Host memory where a host backend is at hand (gloo), else this rank's GPU."""
    on_host = torch.device("cpu") in dist.group.WORLD._device_types  # type: ignore[union-attr]
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def broadcast_bytes(data: bytes, source: int = 0) -> bytes:
    """Those of rank ``source``, on every rank."""
    device = message_device()
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, source)
    buffer = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return bytes(buffer.cpu().numpy())


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's ``value`` (JSON), by rank. Collective."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1 or dist.get_backend() == "fake":  # in a world that is made up there is nobody to ask
        return [value] * num_ranks
    data, device = bytearray(json.dumps(value).encode()), message_device()
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device))
    counts = torch.cat(lengths).tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    found = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    dist.all_gather(found, padded.to(device))
    return [json.loads(bytes(each[:count].cpu().numpy())) for each, count in zip(found, counts, strict=True)]


def require_alike(facts: Mapping[str, Any], fix: str) -> None:
    """Refuse facts that are not the same on all ranks, with the same words on all of them. Collective.

    Args:
        facts: JSON values by the name that the message shall give them.
        fix: What to do about it.

    Raises:
        ConfigError: Names each fact that differs, its values, and the ranks that have them.
    """
    refuse_differences(from_all_ranks(dict(facts)), fix)


def refuse_differences(found: Sequence[Mapping[str, Any]], fix: str) -> None:
    """:func:`require_alike` of what ranks have told each other already."""
    if all(each == found[0] for each in found):
        return
    names = dict.fromkeys(name for each in found for name in each)
    values = {name: [each.get(name) for each in found] for name in names}
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
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
