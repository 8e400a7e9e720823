"""How mesh axes cut a parameter into the local tensors that ranks compute with: as DTensor placements.

A cut is ``Shard`` or, where every rank must get its share of each half of a dim, ``_StridedShard``::

    gate_up [E, 2I, H]   {ep: Shard(0), etp: _StridedShard(1, split_factor=2)}   local [E/ep, 2I/etp, H]

Before it is sharded a parameter that is cut *is* a DTensor on the axes' sub-mesh. Modules of fsdmoe compute
with the plain local tensor inside it and never meet the DTensor; modules that come with DTensor parameters
compute on DTensors (:mod:`fsdmoe.fsdp.dtensor`).

Sharding then gives a rank any flat range of that local tensor, as boxes of the global one
(:mod:`fsdmoe.core.boxes`). For them a strided cut is made on a view of the shape with its dim factored, here
``[E, 2, I, H]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.boxes import Box, Shape, contiguous_runs, contiguous_strides, range_boxes
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import SPLIT_AXES, Axis

Cut = Shard | _StridedShard

_LOCAL = "computes_locally"


class Coordinates(Protocol):
    """What a placement needs of the meshes; :class:`fsdmoe.mesh.Meshes` is one."""

    def size(self, axis: Axis) -> int: ...

    def rank(self, axis: Axis) -> int: ...


class SplitMeshes(Coordinates, Protocol):
    """What split parameters need of the meshes."""

    def submesh(self, *axes: Axis) -> DeviceMesh:
        """The mesh of these axes, in this order."""
        ...

    def axis_of(self, mesh: DeviceMesh, dim: int) -> Axis | None:
        """Which axis a dim of a mesh is for this rank: of ``tp``, ``ep`` and ``etp`` the one with the same
        ranks."""
        ...


@dataclass(frozen=True)
class Placement:
    """How the axes of one mesh cut one parameter; see the module's drawing."""

    global_shape: Shape
    cuts: tuple[tuple[Axis, Cut], ...] = ()
    """An axis of size 1 may be named."""

    def __post_init__(self) -> None:
        dims = [cut.dim for _, cut in self.cuts]
        if len(set(dims)) != len(dims) or any(not 0 <= dim < len(self.global_shape) for dim in dims):
            raise AssertionError(
                f"expected cuts of distinct dims of a {len(self.global_shape)}-dim tensor, got {self.cuts}"
            )
        for _, cut in self.cuts:
            if self.global_shape[cut.dim] % split_factor(cut):
                raise AssertionError(f"expected a factor of {self.global_shape[cut.dim]}, got {cut}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        """A dense parameter that no axis splits."""
        return cls(tuple(shape))

    @property
    def mesh(self) -> Literal["dense", "expert"]:
        """Which mesh's remaining axes shard what this placement leaves: dense axes or ``edp``."""
        return "expert" if any(axis in (Axis.EP, Axis.ETP) for axis, _ in self.cuts) else "dense"

    @cached_property
    def view_shape(self) -> Shape:
        """The global shape with the dims of strided cuts factored."""
        return tuple(size for sizes in self._factors for size in sizes)

    @cached_property
    def splits(self) -> tuple[tuple[Axis, int], ...]:
        """The cuts as pairs (axis, dim of the view)."""
        return tuple((axis, self._view_dims[cut.dim][-1]) for axis, cut in self.cuts)

    def splits_over(self, axis: Axis) -> bool:
        return any(axis == name for name, _ in self.cuts)

    def local_view_shape(self, at: Coordinates) -> Shape:
        shape = list(self.view_shape)
        for axis, dim in self.splits:
            if shape[dim] % at.size(axis):
                raise ConfigError(
                    f"mesh.{axis}: {at.size(axis)} ranks cannot split dim {dim} of {self.view_shape} evenly; "
                    f"choose a divisor of {shape[dim]}"
                )
            shape[dim] //= at.size(axis)
        return tuple(shape)

    def local_shape(self, at: Coordinates) -> Shape:
        """The shape that a rank's module computes with: the local view, folded back to the global number of
        dims."""
        if not self.cuts:
            return self.global_shape
        view = self.local_view_shape(at)
        return tuple(math.prod(view[d] for d in dims) for dims in self._view_dims)

    def boxes(self, at: Coordinates, start: int = 0, end: int | None = None) -> list[Box]:
        """Boxes of the global tensor that the flat range ``[start, end)`` of the local tensor holds at rank
        ``at``."""
        local = self.local_view_shape(at)
        origin = [0] * len(local)
        for axis, dim in self.splits:
            origin[dim] = at.rank(axis) * local[dim]
        strides = contiguous_strides(local)
        found = []
        for low, sizes in range_boxes(local, start, math.prod(local) if end is None else end):
            first = sum(o * s for o, s in zip(low, strides, strict=True)) - start
            view_low = [o + base for o, base in zip(low, origin, strict=True)]
            runs = [
                contiguous_runs(self.view_shape, dims, view_low, sizes, strides) for dims in self._view_dims
            ]
            for choice in itertools.product(*runs):
                found.append(
                    Box(
                        offsets=tuple(run.offset for run in choice),
                        sizes=tuple(run.size for run in choice),
                        start=first + sum(run.skip for run in choice),
                        strides=tuple(run.stride for run in choice),
                    )
                )
        return found

    @cached_property
    def _factors(self) -> list[Shape]:
        """What each global dim is in the view."""
        by_dim = {cut.dim: split_factor(cut) for _, cut in self.cuts}
        return [
            (by_dim[dim], size // by_dim[dim]) if by_dim.get(dim, 1) > 1 else (size,)
            for dim, size in enumerate(self.global_shape)
        ]

    @cached_property
    def _view_dims(self) -> list[range]:
        """Which dims of the view make up each global dim."""
        ends = list(itertools.accumulate(len(sizes) for sizes in self._factors))
        return [range(end - len(sizes), end) for end, sizes in zip(ends, self._factors, strict=True)]


def halves(dim: int) -> Cut:
    """The cut of a dim that holds all gates before all ups: a share of each for every rank."""
    return _StridedShard(dim, split_factor=2)


def split_factor(cut: Cut) -> int:
    """Into how many parts, of which every rank gets its share, the dim falls first."""
    return int(cut.split_factor) if isinstance(cut, _StridedShard) else 1


def placement_of(parameter: torch.Tensor, at: SplitMeshes) -> Placement:
    """How a DTensor is cut, in terms of our axes; any other parameter is dense and whole.

    Raises:
        ConfigError: A dim of its mesh is none of our axes, or its placement is no cut.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Placement.whole(shape)
    cuts: list[tuple[Axis, Cut]] = []
    for dim, how in enumerate(parameter.placements):
        axis = at.axis_of(parameter.device_mesh, dim)
        if axis is None and parameter.device_mesh.size(dim) == 1:
            continue
        if axis is None:
            raise ConfigError(_unknown_axis(parameter.device_mesh, dim, at))
        if isinstance(how, (Shard, _StridedShard)):
            cuts.append((axis, how))
        elif not how.is_replicate():
            raise ConfigError(f"expected Shard or Replicate over {axis}, got {how!r}; redistribute it first")
    if len({cut.dim for _, cut in cuts}) != len(cuts):
        raise ConfigError(f"expected at most one axis to cut each dim, got {parameter.placements}")
    return Placement(shape, tuple(cuts))


def _unknown_axis(mesh: DeviceMesh, dim: int, at: SplitMeshes) -> str:
    names = mesh.mesh_dim_names
    axes = [f"{axis} {at.submesh(axis).mesh.tolist()}" for axis in SPLIT_AXES if at.size(axis) > 1]
    wanted = f"this rank's {' or '.join(axes)}" if axes else "none, for mesh.tp, mesh.ep and mesh.etp are 1"
    return (
        f"dim {dim if names is None else names[dim]!r} of its {mesh}, ranks {mesh.mesh.tolist()}, is no axis "
        f"that splits parameters here; expected {wanted}: take the mesh from meshes[Axis.TP] (or .EP, .ETP) "
        "of fsdmoe.build_meshes, or build one with the same ranks in the same order"
    )


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[TorchPlacement], shape: Sequence[int]
) -> DTensor:
    """``local`` as a DTensor, where it lies: ``DTensor.from_local`` would move it to the mesh's device."""
    meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


@torch.no_grad()
def local_slice(whole: torch.Tensor, placement: Placement, at: Coordinates) -> torch.Tensor:
    """A copy of rank ``at``'s part of a whole tensor (on meta: only its shape)."""
    local_shape = placement.local_shape(at)
    if whole.is_meta:
        return torch.empty(local_shape, dtype=whole.dtype, device="meta")
    view = whole.view(placement.view_shape)
    for axis, dim in placement.splits:
        view = view.chunk(at.size(axis), dim)[at.rank(axis)]
    return view.reshape(local_shape).clone(memory_format=torch.contiguous_format)


def split_parameter(whole: nn.Parameter, placement: Placement, at: SplitMeshes) -> nn.Parameter:
    """Rank ``at``'s part of a whole parameter, as a DTensor whose module computes with the plain local tensor
    in it."""
    return placed_parameter(local_slice(whole, placement, at), placement, at, whole.requires_grad)


def placed_parameter(
    local: torch.Tensor, placement: Placement, at: SplitMeshes, requires_grad: bool = True
) -> nn.Parameter:
    """The same of a part that is there already."""
    if not placement.cuts:
        return nn.Parameter(local, requires_grad=requires_grad)
    mesh = at.submesh(*(axis for axis, _ in placement.cuts))
    made = make_dtensor(local, mesh, [cut for _, cut in placement.cuts], placement.global_shape)
    parameter = nn.Parameter(made, requires_grad=requires_grad)
    setattr(parameter, _LOCAL, True)
    return parameter


def register_split(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put what :func:`split_parameter` made into its module, which remembers it: ``module.to(...)`` puts
    another DTensor in the parameter's place, without its attributes."""
    module.register_parameter(name, parameter)
    if isinstance(parameter, DTensor):
        module.__dict__.setdefault(_LOCAL, set()).add(name)


def recall_splits(model: nn.Module) -> None:
    """After conversions of ``model``: modules that compute with plain local tensors still do."""
    for module in model.modules():
        for name in module.__dict__.get(_LOCAL, ()):
            parameter = module._parameters.get(name)
            if isinstance(parameter, DTensor):
                setattr(parameter, _LOCAL, True)


def computes_on_dtensor(parameter: torch.Tensor) -> bool:
    """Whether the module of ``parameter`` is written for a DTensor: it came as one, and not by
    :func:`placed_parameter`."""
    return isinstance(parameter, DTensor) and not hasattr(parameter, _LOCAL)


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a rank holds of a parameter; no gradient flows through."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
