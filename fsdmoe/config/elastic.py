"""The mesh of an elastic run (``mesh.elastic``) for the ranks that are there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from fsdmoe.config.checks import mesh_problems
from fsdmoe.config.schema import Config
from fsdmoe.core.axes import MeshConfig
from fsdmoe.core.rules import divisors

_PREFERRED = ("ep", "tp", "cp", "etp", "dp_outer")
"""Of two meshes of the same size, the one with more of the earlier axis is taken."""


def fit_mesh(config: Config, world_size: int) -> Config:
    """The configuration with the largest divisors of its degrees that ``world_size`` ranks can be divided by.

    Itself where its degrees fit, where none do (its checks then say why), and where ``mesh.elastic`` is off.
    """
    if not config.mesh.elastic or not mesh_problems(config, world_size):
        return config
    found = (replace(config, mesh=mesh) for mesh in _smaller(config.mesh))
    return next((each for each in found if not mesh_problems(each, world_size)), config)


def told_mesh(asked: Config, taken: Config, world_size: int) -> dict[str, str]:
    """By key, which degrees were taken in place of those asked for."""
    degrees = taken.mesh.axes
    return {
        f"mesh.{axis}": f"{degrees[axis]} (the largest that {world_size} ranks allow)"
        for axis, size in asked.mesh.axes.items()
        if degrees[axis] != size
    }


def _smaller(mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Meshes of divisors of the degrees, the largest first."""
    sizes = itertools.product(*(divisors(getattr(mesh, axis)) for axis in _PREFERRED))
    for found in sorted(sizes, key=lambda each: (math.prod(each), each), reverse=True):
        ep, tp, cp, etp, dp_outer = found
        for dp_shard in dict.fromkeys((mesh.dp_shard, -1)):
            yield replace(mesh, dp_outer=dp_outer, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep, etp=etp)
