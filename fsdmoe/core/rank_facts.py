"""What every rank finds for itself, told to all of them before meshes are built.

==============  ============================================  ===============================================
fact            decides                                       where ranks differ
==============  ============================================  ===============================================
device          backends, groups, kernels                     refused
packages        what a model is made of, what is sent         refused
degrees         groups                                        refused
node size       how ``flex`` moves rows, stages of gathers    agreed: nodes may have different sizes; refused
                                                              where it fits no nodes, and only if asked for
capability      which fp8 kernels there are, and so how       refused with a recipe (``precision.recipe``)
                weights that travel quantised are grouped
==============  ============================================  ===============================================
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from fsdmoe.core.all_ranks import by_rank, from_all_ranks, require_alike
from fsdmoe.core.errors import ConfigError

_NODE_SIZE = "LOCAL_WORLD_SIZE"
_PACKAGES = ("torch", "triton", "transformers", "peft")


class RankFacts(NamedTuple):
    """Of one rank."""

    device: str
    capability: tuple[int, ...] = ()
    """Of its GPU."""
    node_size: str | None = None
    """Ranks of its node, as its environment says; None: not at all."""

    @classmethod
    def own(cls, device_type: str) -> RankFacts:
        """Of this rank."""
        capability = torch.cuda.get_device_capability() if device_type == "cuda" else ()
        return cls(device_type, tuple(capability), os.environ.get(_NODE_SIZE))


def agree_on_facts(device_type: str, degrees: dict[str, int]) -> list[RankFacts]:
    """Those of all ranks, by rank. Collective.

    Raises:
        ConfigError: On all ranks, where some have another kind of device, other versions of packages, or
            other degrees of the meshes than others.
    """
    same: dict[str, Any] = {f"mesh.{axis}": size for axis, size in degrees.items()}
    require_alike(
        same | {"device": device_type} | _versions(),
        "give all ranks the same arguments, devices of one kind and one installation",
    )
    found = from_all_ranks(RankFacts.own(device_type))
    return [RankFacts(device, tuple(capability), node_size) for device, capability, node_size in found]


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]  # builds for different hardware are alike
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def nodes_of(facts: Sequence[RankFacts]) -> list[int]:
    """The node of every rank, where nodes hold neighbouring ranks.

    Raises:
        ConfigError: What the ranks were told of their nodes' sizes fits no nodes.
    """
    told = [fact.node_size for fact in facts]
    sizes = [len(facts) if text is None else int(text) if text.isdecimal() else 0 for text in told]
    if len(set(sizes)) == 1 and sizes[0] > 0:
        return [rank // sizes[0] for rank in range(len(sizes))]
    nodes: list[int] = []
    while len(nodes) < len(sizes):
        first = len(nodes)
        size = sizes[first]
        if not size or sizes[first : first + size] != [size] * size:
            raise ConfigError(
                f"{_NODE_SIZE}: expected the number of ranks on a rank's node, the same on all of them, got "
                f"{by_rank(['none' if text is None else text for text in told])}; start all ranks alike with "
                "torchrun, or unset it everywhere"
            )
        nodes += [first] * size
    return nodes


def require_one_capability(facts: Sequence[RankFacts], key: str) -> None:
    """Refuse GPUs of several kinds where ``key`` decides by what they can compute."""
    if len({fact.capability for fact in facts}) > 1:
        kinds = by_rank([".".join(map(str, fact.capability)) for fact in facts])
        raise ConfigError(
            f"{key}: expected GPUs of one compute capability, by which layers are sharded, got {kinds}; use "
            'GPUs of one kind, or precision.recipe = "bf16"'
        )
