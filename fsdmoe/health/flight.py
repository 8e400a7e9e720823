"""What torch's flight recorder knows of a rank's collectives, and what follows from several ranks' records.

torch records the last collectives of gloo and NCCL in each process (``TORCH_FR_BUFFER_SIZE`` of them). Those
of a group have consecutive numbers, the same on all of its ranks. So the rank whose number stays behind is
the one that never came, and the rank that comes late to most of them is the one that the others wait for.
"""

from __future__ import annotations

import gc
import pickle
import socket
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.core.all_ranks import from_all_ranks

Record = Mapping[str, list[Any]]
_LAST = 1024
"""Collectives of a group that are compared."""
_OF_A_STEP = ("mesh_", "default_pg")
"""How the descriptions of groups begin that a step uses; saves in the background have others."""
_GROUP_WORDS = {"default_pg": "all ranks", "undefined": "a group of its own"}
_LATE_SHARE = 0.05
"""Of a step: a rank that keeps the others waiting for longer is slow."""


def entries() -> list[dict[str, Any]]:
    """The collectives of this process that are still on record, the oldest first.

    Pickled by torch in this very process: read in a third of the time that its JSON takes.
    """
    c10d: Any = torch._C._distributed_c10d
    dumps = [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]
    was_collecting = gc.isenabled()
    gc.disable()  # so many new objects would set off a collection of everything there is
    try:
        records = [pickle.loads(dump(True, False, False)) for dump in dumps]  # without stacks, all of them
    finally:
        if was_collecting:
            gc.enable()
    return [each for record in records for each in record.get("entries", []) if not each.get("is_p2p")]


def open_collectives(found: Sequence[Mapping[str, Any]]) -> Record:
    """By group: the number and the name of its newest collective, whether this rank still waits in it, and
    the group's ranks."""
    newest = {each["process_group"][0]: each for each in found}
    ranks = {group: _ranks_of(group) for group in newest}
    return {
        group: [each["collective_seq_id"], _name(each), not each["retired"], ranks[group]]
        for group, each in newest.items()
        if ranks[group]
    }


def _ranks_of(group: str) -> list[int]:
    """None of a group that was destroyed; the recorder keeps its entries."""
    try:
        found = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    except RuntimeError:
        return []
    return dist.get_process_group_ranks(found)


def _name(entry: Mapping[str, Any]) -> str:
    name = entry["profiling_name"].rpartition(":")[2]
    description = entry["process_group"][1]
    return f"{name} over {_GROUP_WORDS.get(description, description.removeprefix('mesh_'))}"


def explain(records: Mapping[int, Record], places: Sequence[str]) -> list[str]:
    """Why a run hangs, a line a cause.

    Args:
        records: What :func:`open_collectives` said on each rank that answered.
        places: Words for every rank.
    """
    silent = [rank for rank in range(len(places)) if rank not in records]
    lines = [f"{places[rank]} does not answer: it is stopped, or gone" for rank in silent]
    groups = {group: each[3] for record in records.values() for group, each in record.items()}
    for group, ranks in groups.items():
        here = {rank: records[rank][group] for rank in ranks if group in records.get(rank, {})}
        waiting = {rank: each for rank, each in here.items() if each[2]}
        if not waiting:
            continue
        number, name = max((each[0], each[1]) for each in waiting.values())
        late = [rank for rank in ranks if rank in records and here.get(rank, [0])[0] < number]
        who = ", ".join(places[rank] for rank in waiting if waiting[rank][0] == number)
        for rank in late:
            text = f"{places[rank]} never came to {name} (number {number}), in which {who} wait"
            lines.append(text + _where(records[rank]))
        others = {each[1] for each in here.values() if each[0] == number} - {name}
        if others and not late:
            lines.append(f"ranks disagree on number {number}: {name} against {', '.join(sorted(others))}")
    return lines or ["all ranks answer and none waits in a collective: see their stacks"]


def _where(record: Record) -> str:
    inside = [name for _, name, is_open, _ in record.values() if is_open]
    return f"; it waits in {inside[-1]} itself" if inside else "; it waits in no collective"


@dataclass(frozen=True)
class Lateness:
    """How many seconds of a step the others wait for one rank, and where most."""

    seconds: float
    where: str


def lateness(found: Sequence[Mapping[str, Any]], ends: Sequence[int]) -> Lateness:
    """Of this rank, in three of four steps on record or more: a rank that is slow is late in nearly all of
    them, one that was held up is in some. Collective.

    On a host, a rank is late by when it came, by the clocks of the hosts. A GPU runs behind its host: there,
    the rank that others wait for is the one whose collectives take the shortest, which
    ``TORCH_NCCL_ENABLE_TIMING=1`` records.

    Args:
        found: The collectives on record.
        ends: When steps ended, in nanoseconds since 1970.
    """
    late: dict[int, dict[str, float]] = {}
    origin = min(from_all_ranks(ends[-1]))  # the same on all ranks: only small numbers are summed exactly
    for name, mine in _common_groups(found).items():
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        size = dist.get_world_size(group)
        last = mine[-1]["collective_seq_id"]
        recent = [entry for entry in mine if last - entry["collective_seq_id"] < _LAST]
        times = torch.zeros(2, _LAST, dtype=torch.float64)
        places = [last - entry["collective_seq_id"] for entry in recent]
        times[0, places] = 1.0
        times[1, places] = torch.tensor([_moment(entry, origin) for entry in recent], dtype=torch.float64)
        total = times.clone()
        dist.all_reduce(total, group=group)
        behind = times[1] - (total[1] - times[1]) / (size - 1)  # the mean of the others
        behind[total[0] < size] = 0.0  # not on every rank's record
        for entry, seconds in zip(recent, behind[places].tolist(), strict=True):
            step = bisect(ends, entry["time_created_ns"])
            late.setdefault(step, defaultdict(float))[_name(entry)] += seconds
    # The first step may be on record in part only, the last has not ended.
    whole = [late[step] for step in sorted(late)[1:] if step < len(ends)]
    if not whole:
        return Lateness(0.0, "")
    names = {name for each in whole for name in each}
    where = max(names, key=lambda name: sum(each.get(name, 0.0) for each in whole))
    ordered = sorted(sum(each.values()) for each in whole)
    return Lateness(ordered[len(ordered) // 4], where)


def _common_groups(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """This rank's records by group, of the groups of meshes that all of their ranks have records of, in the
    order of creation. Collective."""
    mine: dict[str, list[Mapping[str, Any]]] = {}
    for entry in found:
        name, description = entry["process_group"]
        if description.startswith(_OF_A_STEP):
            mine.setdefault(name, []).append(entry)
    known = from_all_ranks(sorted(mine))
    return {
        name: mine[name]
        for name in sorted(mine, key=lambda name: (len(name), name))
        if len(ranks := _ranks_of(name)) > 1 and all(name in known[rank] for rank in ranks)
    }


def _moment(entry: Mapping[str, Any], origin: int) -> float:
    if "duration_ms" in entry:
        return -entry["duration_ms"] / 1e3
    return float(entry["time_created_ns"] - origin) / 1e9


def slow_rank(found: Sequence[Lateness], step_seconds: float) -> int | None:
    """The rank that the others wait for, if it is for more than a twentieth of a step."""
    rank = max(range(len(found)), key=lambda r: found[r].seconds)
    return rank if found[rank].seconds > _LATE_SHARE * step_seconds else None


def place_of_ranks() -> list[str]:
    """``rank 3 (node1)`` for every rank. Collective."""
    hosts = from_all_ranks(socket.gethostname())
    return [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]
