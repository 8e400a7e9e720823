"""The two device meshes of a run (see :mod:`fsdmoe.core.axes`), and every process group of their axes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdmoe.core.all_ranks import by_rank
from fsdmoe.core.axes import (
    DENSE_AXES,
    EXPERT_AXES,
    FLATTENED_DENSE,
    FLATTENED_EXPERT,
    SPLIT_AXES,
    Axis,
    Degrees,
    MeshConfig,
    axis_sizes,
    resolve_degrees,
)
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.process_group import init_distributed
from fsdmoe.core.rank_facts import RankFacts, agree_on_facts, nodes_of

_EXCHANGING = (Axis.TP, Axis.CP, Axis.SEQUENCE, Axis.EP, Axis.ETP, Axis.EXPERT)
"""Axes over which a layer exchanges activations, while weights and gradients travel over others."""


class ContextGroups(NamedTuple):
    """Ranks that share a micro-batch under dynamic context parallelism; none where it is this rank alone."""

    attention: dist.ProcessGroup | None
    """Those with other tokens and the same heads."""
    sequence: dist.ProcessGroup | None
    """The same times ``tp``: all that hold pieces of these sequences."""


class NodeGroups(NamedTuple):
    """The two groups by which rows go to a node once."""

    between: dist.ProcessGroup
    """This rank's counterparts on all nodes of its EP group, by node."""
    inside: dist.ProcessGroup
    """The ranks of its EP group on its own node."""


class Meshes:
    """The dense and the expert mesh over the same ranks, with named access to every group.

    Made by ``build_meshes``. ``dense`` and ``expert`` are a torch ``DeviceMesh`` each; ``degrees`` holds the
    size of every plain axis, ``facts`` what every rank has said of itself.
    """

    def __init__(self, degrees: Degrees, device_type: str, facts: Sequence[RankFacts] | None = None) -> None:
        self.degrees = degrees
        self.device_type = device_type
        # Nobody else is there to ask in a world that is made up.
        self.facts = facts or [RankFacts.own(device_type)] * degrees.world_size
        self._nodes: list[int] | None = None
        self.dense = _mesh(device_type, degrees, DENSE_AXES)
        self.expert = _mesh(device_type, degrees, EXPERT_AXES)
        self._by_axis: dict[Axis, DeviceMesh] = {}
        # Every parameter asks, of a few meshes; torch computes the ranks of one anew each time.
        self._submeshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._axis_of: dict[tuple[DeviceMesh, int], Axis | None] = {}
        self._context_groups: dict[int, ContextGroups] | None = None
        self._node_groups: NodeGroups | None = None
        for mesh, axes, flattened in (
            (self.dense, DENSE_AXES, FLATTENED_DENSE),
            (self.expert, EXPERT_AXES, FLATTENED_EXPERT),
        ):
            self._by_axis.update({axis: mesh[axis.value] for axis in axes})
            for name, parts in flattened.items():
                self._by_axis[name] = mesh[tuple(part.value for part in parts)]._flatten(name.value)
        self._own_groups = self._communicators_of_exchanges() if device_type == "cuda" else {}

    def _communicators_of_exchanges(self) -> dict[Axis, dist.ProcessGroup]:
        """An axis that fills the world gets the world's own group from torch. On a GPU the collectives of one
        communicator run one after another: exchanges would wait for gathers, so they get another one."""
        world, found = dist.get_world_size(), {}
        for axis in _EXCHANGING:
            if self.size(axis) == world > 1:
                found[axis] = dist.new_group(list(range(world)), group_desc=f"mesh_{axis}")
        return found

    def __getitem__(self, axis: Axis) -> DeviceMesh:
        """The one-dimensional mesh of this rank along ``axis``."""
        return self._by_axis[axis]

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of this rank along ``axis``."""
        return self._own_groups.get(axis) or self._by_axis[axis].get_group()

    def add_up(self, tensor: torch.Tensor, axis: Axis) -> None:
        """Sum ``tensor`` in place over the ranks along ``axis``. A rank that is alone calls no collective."""
        if self.size(axis) > 1:
            dist.all_reduce(tensor, group=self.group(axis))

    def size(self, axis: Axis) -> int:
        """The number of ranks along ``axis``."""
        return self._by_axis[axis].size()

    def rank(self, axis: Axis) -> int:
        """This rank's coordinate along ``axis``."""
        return self._by_axis[axis].get_local_rank()

    def submesh(self, *axes: Axis) -> DeviceMesh:
        """The mesh of these axes of the dense or of the expert mesh, outermost first."""
        if len(axes) == 1:
            return self._by_axis[axes[0]]
        if axes not in self._submeshes:
            mesh = self.dense if axes[0] in DENSE_AXES else self.expert
            self._submeshes[axes] = mesh[tuple(axis.value for axis in axes)]
        return self._submeshes[axes]

    def axis_of(self, mesh: DeviceMesh, dim: int) -> Axis | None:
        """Which of the axes that split parameters a dim of any mesh is: the one with the same ranks in the
        same order; of several such axes (``tp`` and ``ep`` may be the same ranks) the one of that name."""
        if (mesh, dim) not in self._axis_of:
            self._axis_of[mesh, dim] = self._find_axis(mesh, dim)
        return self._axis_of[mesh, dim]

    def _find_axis(self, mesh: DeviceMesh, dim: int) -> Axis | None:
        where = mesh.get_coordinate()
        if where is None:
            return None
        ranks = mesh.mesh[tuple(slice(None) if d == dim else n for d, n in enumerate(where))].tolist()
        found = [axis for axis in SPLIT_AXES if self._by_axis[axis].mesh.tolist() == ranks]
        name = None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dim]
        return next((axis for axis in found if axis.value == name), found[0] if found else None)

    def context_groups(self) -> dict[int, ContextGroups]:
        """For dynamic context parallelism: this rank's aligned group of every power of two that divides
        ``dp_shard x cp``. Built when first asked for; every rank must ask."""
        if self._context_groups is None:
            self._context_groups = {}
            ranks_FT = self.dense.mesh.view(self.degrees.dp_outer, -1, self.degrees.tp)[
                self.rank(Axis.DP_OUTER)
            ]
            size = 1
            while ranks_FT.shape[0] % size == 0:
                first = self.rank(Axis.FSDP) // size * size
                block_RT = ranks_FT[first : first + size]
                attention = _new_group(block_RT[:, self.rank(Axis.TP)])
                sequence = attention if self.degrees.tp == 1 else _new_group(block_RT.flatten())
                self._context_groups[size] = ContextGroups(attention, sequence)
                size *= 2
        return self._context_groups

    def node_of(self, rank: int) -> int:
        """The node that a rank of the world runs on; all ranks get the same answer.

        Raises:
            ConfigError: What the ranks were told of their nodes (``LOCAL_WORLD_SIZE``) does not fit together.
        """
        if self._nodes is None:
            self._nodes = nodes_of(self.facts)
        return self._nodes[rank]

    def node_groups(self) -> NodeGroups:
        """For rows that go to a node once. Built when first asked for; every rank must ask.

        Raises:
            ConfigError: On all ranks, if some EP group has not the same number of ranks, two or more, on each
                of several nodes.
        """
        if self._node_groups is None:
            ranks_GP = self.expert.mesh.movedim(2, 3).reshape(-1, self.degrees.ep)
            sizes = {_share_of_nodes([self.node_of(rank) for rank in ranks]) for ranks in ranks_GP.tolist()}
            size = sizes.pop()
            if sizes or size < 2:
                nodes = [self.node_of(rank) for rank in range(self.degrees.world_size)]
                got = f"node {by_rank(nodes)}" if len(set(nodes)) > 1 else "all ranks on one node"
                raise ConfigError(
                    "experts.dispatcher: by_node expected each group of mesh.ep = "
                    f"{self.degrees.ep} ranks to have equally many, two or more, on each of several nodes, "
                    f'got {got}; set experts.dispatcher = "all_to_all"'
                    + (", or another mesh.ep" if len(set(nodes)) > 1 else "")
                )
            own_NM = self._by_axis[Axis.EP].mesh.view(-1, size)
            place = self.rank(Axis.EP)
            self._node_groups = NodeGroups(
                *(
                    # Named after the axis, by which traffic is told apart.
                    dist.new_group(
                        ranks.tolist(), use_local_synchronization=True, group_desc=f"mesh_{Axis.EP}"
                    )
                    for ranks in (own_NM[:, place % size], own_NM[place // size])
                )
            )
        return self._node_groups

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)


def build_meshes(
    config: MeshConfig | None = None,
    *,
    ep: int = 1,
    etp: int = 1,
    tp: int = 1,
    cp: int = 1,
    dp_shard: int = -1,
    dp_outer: int = 1,
) -> Meshes:
    """Build both meshes over the whole world, from a config section or from degrees.

    Starts the process group from torchrun's environment when none is running (one rank when there is no
    torchrun). Collective: every rank calls it, with the same degrees.

    Args:
        config: The ``mesh`` section; the degrees below are then not looked at.
        ep: Ranks over which the experts of a layer are split. May exceed ``dp_shard``.
        etp: Ranks over which each expert is split; usually 1.
        tp: Ranks that share attention, dense layers and vocabulary.
        cp: Ranks that split each sequence.
        dp_shard: Ranks that share one copy of the weights by sharding it; -1 takes what is left.
        dp_outer: Replicas of the whole (HSDP).

    Returns:
        The dense and the expert mesh, with a process group for every axis.

    Raises:
        ConfigError: The world cannot be divided so, which is raised before a process group is started; or
            ranks have different kinds of device or versions of packages.
    """
    if config is None:
        config = MeshConfig(dp_outer=dp_outer, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep, etp=etp)
    resolve_degrees(
        config, int(os.environ.get("WORLD_SIZE", "1")) if not dist.is_initialized() else dist.get_world_size()
    )
    device_type = init_distributed()
    degrees = resolve_degrees(config, dist.get_world_size())
    return Meshes(degrees, device_type, agree_on_facts(device_type, vars(degrees)))


def mesh_without_groups(ranks: dict[Axis, int], sizes: dict[Axis, int]) -> DeviceMesh:
    """A mesh of axes of these sizes, seen by the rank with these coordinates, for plans and for tests: nobody
    can communicate on it."""
    shape, number = tuple(sizes[axis] for axis in ranks), 0
    for axis, rank in ranks.items():
        number = number * sizes[axis] + rank
    members = torch.arange(math.prod(shape)).view(shape)
    names = tuple(axis.value for axis in ranks)
    return DeviceMesh("cpu", members, mesh_dim_names=names, _init_backend=False, _rank=number)


def _mesh(device_type: str, degrees: Degrees, axes: tuple[Axis, ...]) -> DeviceMesh:
    names, sizes = tuple(axis.value for axis in axes), axis_sizes(degrees)
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=names)


def _share_of_nodes(nodes: list[int]) -> int:
    """Ranks of a group on each of its nodes, neighbours; 0 if that differs, or if there is one node only."""
    size = nodes.count(nodes[0])
    blocks = {tuple(nodes[first : first + size]) for first in range(0, len(nodes), size)}
    is_even = all(len(block) == size and len(set(block)) == 1 for block in blocks)
    return size if is_even and 1 < len(blocks) == len(set(nodes)) else 0


def _new_group(ranks: torch.Tensor) -> dist.ProcessGroup | None:
    """Only its own ranks take part in making it."""
    if ranks.numel() == 1:
        return None
    return dist.new_group(ranks.tolist(), use_local_synchronization=True)
