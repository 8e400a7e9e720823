"""``memory.recompute = "auto"``: what is recomputed, from the free memory of the GPUs.

Choices are parts in all layers, or whole layers in the first of them. Of those whose plan fits, the one whose
estimated step is shortest is taken. Rates are those of one GPU that was measured: only the order counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fsdmoe.config import Config
from fsdmoe.config.compatibility import check_compatibility
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.plan.estimate import HEADROOM
from fsdmoe.plan.hardware import GIB, GPUS
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import estimate_memory, layer_counts, state_bytes
from fsdmoe.plan.memory_section import WHOLE_LAYERS, recompute_choices
from fsdmoe.plan.step_time import estimate_time

_KEY = "memory.recompute"
_RATES = GPUS["h200"]


@dataclass(frozen=True)
class MemoryDecision:
    """A configuration in which nothing is open, and what was decided why, by key."""

    config: Config
    told: dict[str, str]


def decide_memory(config: Config, world_size: int, free: int | None) -> MemoryDecision:
    """What to recompute, where the configuration leaves it open.

    Args:
        config: The configuration.
        world_size: The number of ranks.
        free: Bytes that a rank can take on its GPU; None: there is no GPU, and no limit.
    """
    if not config.memory.is_open:
        return MemoryDecision(config, {})
    if free is None:
        nothing = replace(config, memory=replace(config.memory, recompute=()))
        return MemoryDecision(nothing, {_KEY: "nothing (there is no GPU whose memory is a limit)"})
    job, limit = Job.of(config), (1 - HEADROOM) * free
    states = state_bytes(job, Setting.of(config, world_size))
    found = []
    for memory in _choices(config):
        setting = replace(Setting.of(config, world_size), memory=memory)
        needed = estimate_memory(job, setting, states).total
        found.append((estimate_time(job, setting, _RATES).total, needed, memory))
    most = max(needed for _, needed, _ in found)
    fitting = [each for each in found if each[1] <= limit]
    _, needed, memory = min(fitting or found, key=lambda each: each[0] if fitting else each[1])
    parts = " and ".join(memory.recompute) or "nothing"
    parts += f" in layers {memory.layers}" if memory.recompute and memory.layers != "all" else ""
    why = f"plan: {needed / GIB:.1f} GiB of the {limit / GIB:.1f} that may be filled"
    why += f", recomputing nothing {most / GIB:.1f}" if memory.recompute else ""
    why += "" if fitting else "; it may not fit"
    return MemoryDecision(replace(config, memory=memory), {_KEY: f"{parts} ({why})"})


def _choices(config: Config) -> Iterator[MemoryConfig]:
    """Those that the rest of the configuration goes with."""
    is_wrapped = config.model.hf is not None
    own = config.memory
    for parts in recompute_choices(config.model, is_wrapped=is_wrapped):
        ways = [replace(own, recompute=tuple(sorted(parts)))]  # type: ignore[arg-type]
        if parts == WHOLE_LAYERS and own.layers == "all":
            num_layers = sum(layer_counts(config.model).values())
            ways += [replace(ways[0], layers=f"0-{last}") for last in range(num_layers - 1)]
        elif parts and is_wrapped:
            continue  # which parts it has is known only once it is built
        for memory in ways:
            refused = [row for row, _ in check_compatibility(replace(config, memory=memory))]
            if not any(_KEY in (row.feature.key, row.other.key) for row in refused):
                yield memory


def free_bytes(device: torch.device) -> int | None:
    """What each rank can take on its GPU: the least of all ranks, which may share one; None without GPUs.
    Collective."""
    if device.type != "cuda":
        return None
    identity = str(torch.cuda.get_device_properties(device).uuid)
    found = from_all_ranks([torch.cuda.mem_get_info(device)[0], identity])
    sharing = [each for _, each in found]
    return min(free // sharing.count(each) for free, each in found)
