"""Step times of the profiled ranks, and which of them the others wait for.

Ranks of one run take the same time for a step, because they wait for each other in its collectives. What
tells them apart is how long each computes: the one that computes longest is the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from fsdmoe.observe.exposed import Exposure


def by_rank(own: Exposure | None) -> dict[int, Exposure]:
    """Everybody's, of those that were profiled. Collective where there are several ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return {} if own is None else {0: own}
    everyones: list[Exposure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return {rank: found for rank, found in enumerate(everyones) if found is not None}


def slowest(found: Mapping[int, Exposure]) -> int | None:
    """The rank that computes longest; None where there is no other to compare it with."""
    return max(found, key=lambda rank: found[rank].compute) if len(found) > 1 else None


def rank_lines(found: Mapping[int, Exposure], *, num_steps: int) -> list[str]:
    """A line a rank."""
    last = slowest(found)

    def line(rank: int) -> str:
        each, ms = found[rank], 1e3 / num_steps
        text = f"rank {rank}: {each.span * ms:.1f} ms a step, {each.compute * ms:.1f} computing, "
        text += f"{each.exposed * ms:.1f} waiting for traffic, {each.idle * ms:.1f} idle"
        return f"{text} <- slowest" if rank == last else text

    return [line(rank) for rank in sorted(found)]


def rank_facts(found: Mapping[int, Exposure], *, num_steps: int) -> dict[str, str]:
    """Lines of the summary: the first rank's step taken apart, and the slowest rank."""
    first, ms = found[min(found)], 1e3 / num_steps
    kinds = ", ".join(
        f"{kind.replace('_', '-')} {traffic.exposed * ms:.1f}" for kind, traffic in first.kinds.items()
    )
    text = f"{first.exposed * ms:.1f} of {first.span * ms:.1f} ms a step (rank {min(found)})"
    facts = {"exposed": f"{text}: {kinds}" if kinds else text}
    last = slowest(found)
    if last is not None:
        mean = sum(each.compute for each in found.values()) / len(found)
        facts["slowest rank"] = (
            f"{last}, computes {found[last].compute * ms:.1f} ms a step, the mean of {len(found)} ranks is "
            f"{mean * ms:.1f}"
        )
    return facts
