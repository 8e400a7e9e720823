"""Values that several ranks hold must be the same bits: weights of replicas (``dp_outer``) and buffers.

A memory that flips a bit, or a core that computes wrongly, changes one copy silently; training goes on with
both. Each comparison reads the values once and sends eight bytes a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from fsdmoe.checkpoint.parts import model_state
from fsdmoe.core import compat
from fsdmoe.core.axes import Axis
from fsdmoe.core.errors import UserError
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Meshes

_OF_EXPERTS = (Axis.EDP, Axis.EDP_ETP)


class CorruptionError(UserError):
    """Copies of one value differ between ranks."""


class Checksums:
    """Compares the copies of a model's values. All of it is collective."""

    def __init__(self, model: nn.Module, meshes: Meshes, places: Sequence[str]) -> None:
        self._model = model
        self._meshes = meshes
        self._places = places
        self._last_good = 0

    def compare(self, step: int) -> None:
        """Compare all copies.

        Raises:
            CorruptionError: Names tensor and ranks; on every rank of the group that holds the copies.
        """
        by_axis: dict[Axis, dict[str, torch.Tensor]] = {}
        for name, value in model_state(self._model, self._meshes).items():
            axis = Axis.WORLD
            if isinstance(value, ShardedTensor):
                axis = Axis.EXPERT_DP_OUTER if value.shard_axis in _OF_EXPERTS else Axis.DP_OUTER
                value = value.piece
            if self._meshes.size(axis) > 1:
                by_axis.setdefault(axis, {})[name] = value
        wrong = [text for axis, values in by_axis.items() for text in self._differences(axis, values)]
        if wrong:
            raise CorruptionError(
                f"health.checksums: values that must be the same on several ranks differ after step {step}: "
                f"{'; '.join(wrong[:8])}. They were alike after step {self._last_good}: check the memory of "
                "these ranks, and go on from a checkpoint up to there (checkpoint.load)"
            )
        self._last_good = step

    def _differences(self, axis: Axis, values: dict[str, torch.Tensor]) -> list[str]:
        empty = torch.zeros((), dtype=torch.int64, device=self._meshes.device)
        own = torch.stack(
            [torch.hash_tensor(v.detach()).view(torch.int64) if v.numel() else empty for v in values.values()]
        ).to(self._meshes.device)
        group = self._meshes.group(axis)
        size = self._meshes.size(axis)
        everyones = own.new_empty(size * own.numel())
        compat.all_gather(everyones, own, group)
        found = everyones.view(size, -1).tolist()
        ranks = torch.distributed.get_process_group_ranks(group)
        return [
            f"{name} on {self._named([ranks[i] for i in odd_ones([row[column] for row in found])])}"
            for column, name in enumerate(values)
            if len({row[column] for row in found}) > 1
        ]

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._places[rank] for rank in ranks)


def odd_ones(digests: Sequence[int]) -> list[int]:
    """Those that differ from what most have; all of them where there is no majority."""
    most, count = Counter(digests).most_common(1)[0]
    if count * 2 <= len(digests):
        return list(range(len(digests)))
    return [place for place, digest in enumerate(digests) if digest != most]
