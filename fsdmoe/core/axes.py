"""The axes of the two device meshes, the degrees that a configuration gives them, and how ranks divide.

The same ranks are seen twice, innermost axis last::

    dense mesh    dp_outer x dp_shard x cp x tp      attention, norms, router, embedding, head
    expert mesh   dp_outer x edp      x ep x etp     the experts of the MoE layers

so the only rule that ties them is ``edp * ep * etp == dp_shard * cp * tp`` (``edp`` is what is left over).
EP may span any of ``tp``, ``cp`` and ``dp_shard`` ("parallel folding"), never ``dp_outer``. Example, 8 ranks
with ``dp_shard=2 cp=2 tp=2`` and ``ep=4``::

    rank            0  1  2  3  4  5  6  7
    tp              0  1  0  1  0  1  0  1
    cp              0  0  1  1  0  0  1  1
    dp_shard        0  0  0  0  1  1  1  1
    ep              0  1  2  3  0  1  2  3      neighbours, so one EP group stays in one NVLink domain
    edp             0  0  0  0  1  1  1  1

Flattened axes, each with its own communicator, are named in :class:`Axis`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import divisors


class Axis(StrEnum):
    """Every mesh axis, plain and flattened."""

    DP_OUTER = "dp_outer"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    EDP = "edp"
    EP = "ep"
    ETP = "etp"
    BATCH = "batch"  # dp_outer x dp_shard: ranks that read different rows of data
    FSDP = "fsdp"  # dp_shard x cp: shards of parameters that TP splits
    FSDP_TP = "fsdp_tp"  # dp_shard x cp x tp: shards of parameters that TP leaves whole
    LOSS = "loss"  # dp_outer x dp_shard x cp: ranks whose losses add up
    SEQUENCE = "sequence"  # cp x tp: ranks that hold pieces of one sequence
    EXPERT = "expert"  # ep x etp: ranks that together hold every expert once
    EDP_ETP = "edp_etp"  # edp x etp: shards of parameters of experts that ETP leaves whole
    EXPERT_DP_OUTER = "expert_dp_outer"  # dp_outer again, as a communicator of its own for expert shards
    WORLD = "world"


DENSE_AXES = (Axis.DP_OUTER, Axis.DP_SHARD, Axis.CP, Axis.TP)
EXPERT_AXES = (Axis.EXPERT_DP_OUTER, Axis.EDP, Axis.EP, Axis.ETP)
SPLIT_AXES = (Axis.TP, Axis.EP, Axis.ETP)
"""Those that split parameters; the others shard or replicate what these leave."""

FLATTENED_DENSE = {
    Axis.BATCH: (Axis.DP_OUTER, Axis.DP_SHARD),
    Axis.FSDP: (Axis.DP_SHARD, Axis.CP),
    Axis.FSDP_TP: (Axis.DP_SHARD, Axis.CP, Axis.TP),
    Axis.LOSS: (Axis.DP_OUTER, Axis.DP_SHARD, Axis.CP),
    Axis.SEQUENCE: (Axis.CP, Axis.TP),
    Axis.WORLD: DENSE_AXES,
}
FLATTENED_EXPERT = {Axis.EXPERT: (Axis.EP, Axis.ETP), Axis.EDP_ETP: (Axis.EDP, Axis.ETP)}


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks are arranged."""

    dp_outer: int = 1
    """Replicas of the whole sharded model (HSDP); 1 shards over everything."""
    dp_shard: int = -1
    """Ranks that share one copy of the weights by sharding it; -1 takes what is left of the world."""
    cp: int = 1
    """Context parallelism: ranks that split each sequence."""
    tp: int = 1
    """Tensor parallelism of attention and dense layers."""
    ep: int = 1
    """Expert parallelism: ranks over which the experts of a layer are split. May exceed dp_shard."""
    etp: int = 1
    """Tensor parallelism inside each expert; independent of tp, usually 1."""
    elastic: bool = False
    """The degrees are preferences: a start on a number of ranks that they do not fit takes the largest
    divisors of them that do (docs/many_machines.md). Batches stay the same."""

    @property
    def axes(self) -> dict[str, int]:
        """The degrees by name."""
        return {name: size for name, size in vars(self).items() if name != "elastic"}

    def __post_init__(self) -> None:
        problems = [
            f"mesh.{axis}: expected a positive number, got {size}; write 1 to switch the axis off"
            for axis, size in self.axes.items()
            if size < 1 and not (axis == "dp_shard" and size == -1)
        ]
        refuse(problems)


@dataclass(frozen=True)
class Degrees:
    """The size of every plain axis, complete and consistent."""

    dp_outer: int
    dp_shard: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_outer * self.dp_shard * self.cp * self.tp


def resolve_degrees(config: MeshConfig, world_size: int) -> Degrees:
    """Fill in ``dp_shard = -1`` and ``edp``.

    Raises:
        ConfigError: ``world_size`` ranks cannot be divided so; the message names degrees that can.
    """
    fixed = config.dp_outer * config.cp * config.tp
    dp_shard = config.dp_shard
    if dp_shard == -1:
        if world_size % fixed:
            raise ConfigError(
                f"mesh.dp_shard: {world_size} ranks cannot be divided by dp_outer*cp*tp = {fixed}; "
                f"start a multiple of {fixed} ranks or lower mesh.dp_outer, mesh.cp or mesh.tp"
            )
        dp_shard = world_size // fixed
    if fixed * dp_shard != world_size:
        raise ConfigError(
            f"mesh: dp_outer*dp_shard*cp*tp = {fixed * dp_shard}, but there are {world_size} ranks; "
            f"set mesh.dp_shard = -1 to fill the world, or start {fixed * dp_shard} ranks"
        )
    inside = dp_shard * config.cp * config.tp
    expert = config.ep * config.etp
    if inside % expert:
        possible = f"ep*etp from {', '.join(map(str, divisors(inside)))}" if inside > 1 else "mesh.ep = 1"
        more = config.dp_outer * math.lcm(config.cp * config.tp, expert)
        raise ConfigError(
            f"mesh.ep: ep*etp = {expert} must divide dp_shard*cp*tp = {inside} "
            f"(edp*ep*etp == dp_shard*cp*tp); choose {possible}, or start a multiple of {more} "
            f"ranks in all: on one host --nproc-per-node {more} (in a dry run --world {more})"
        )
    return Degrees(
        dp_outer=config.dp_outer, dp_shard=dp_shard, cp=config.cp, tp=config.tp,
        edp=inside // expert, ep=config.ep, etp=config.etp,
    )  # fmt: skip


def axis_sizes(degrees: Degrees) -> dict[Axis, int]:
    """The size of every axis, flattened ones included."""
    plain = {axis: getattr(degrees, axis.removeprefix("expert_")) for axis in (*DENSE_AXES, *EXPERT_AXES)}
    flattened = FLATTENED_DENSE | FLATTENED_EXPERT
    return plain | {axis: math.prod(plain[part] for part in parts) for axis, parts in flattened.items()}
