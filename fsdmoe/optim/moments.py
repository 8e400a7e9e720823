"""How the moments of each parameter are kept: in which format, and on the device or on the host.

Decided from plans alone, so that a dry run counts what a real run allocates. With one plain format for
everything on the device a group's moments are flat buffers like its main weights; otherwise every parameter
has buffers of its own.

A parameter is kept in eight bits (``float8``, :mod:`fsdmoe.kernels.block_floats`) if its *whole* shape says
so, whatever its shards are: matrices of ``MIN_SMALL`` elements or more. The rest (norms, biases) stays in
float32. Blocks of 64 elements are counted from the start of the whole parameter. Slices are cut at multiples
of 64 anyway, so no rank ever holds a part of a block, and nothing is padded for it; a mesh axis that would
cut one is refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fsdmoe.errors import ConfigError
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.memory_plan import MomentBytes
from fsdmoe.fsdp.plan import GroupPlan, ParamPlan
from fsdmoe.kernels.block_floats import BLOCK, Place, num_blocks
from fsdmoe.mesh import Axis
from fsdmoe.placement import Coordinates, Placement, split_factor

MomentFormat = torch.dtype | Literal["float8"]

MIN_SMALL = 4096


@dataclass(frozen=True)
class MomentPolicy:
    """What the ``optim`` section says about moments."""

    first: MomentFormat = torch.float32
    second: MomentFormat = torch.float32

    @property
    def formats(self) -> tuple[MomentFormat, MomentFormat]:
        return self.first, self.second

    @property
    def is_flat(self) -> bool:
        """Buffers of whole groups will do."""
        return self.first != "float8" and self.second != "float8"

    def of(self, plan: ParamPlan) -> tuple[MomentFormat, MomentFormat]:
        """The formats of one parameter's moments."""
        shape = plan.placement.global_shape
        is_small = len(shape) >= 2 and math.prod(shape) >= MIN_SMALL
        first, second = (
            torch.float32 if kept == "float8" and not is_small else kept for kept in (self.first, self.second)
        )
        return first, second


def format_bytes(kept: MomentFormat, num_elements: int) -> int:
    """What a moment of so many elements takes."""
    if kept == "float8":
        return num_elements + num_blocks(num_elements)
    assert isinstance(kept, torch.dtype)
    return num_elements * kept.itemsize


def moment_bytes(policy: MomentPolicy) -> Callable[[Sequence[GroupPlan], Coordinates], MomentBytes]:
    """For :func:`fsdmoe.fsdp.memory_plan.plan_memory`."""

    def count(groups: Sequence[GroupPlan], at: Coordinates) -> MomentBytes:
        device = 0
        for group in groups:
            if policy.is_flat:
                numel = group.layout.slice_numel
                device += format_bytes(policy.first, numel) + format_bytes(policy.second, numel)
                continue
            for plan, owned in zip(group.params, group.layout.owned(at.rank(group.axis)), strict=True):
                formats = policy.of(plan)
                if "float8" in formats:
                    place_of(plan, owned, at)  # refuses what a real run refuses
                device += sum(format_bytes(kept, owned.numel) for kept in formats)
        return MomentBytes(device)

    return count


def place_of(plan: ParamPlan, owned: OwnedRange, at: Coordinates) -> Place:
    """Where a rank's elements lie in the whole parameter.

    Raises:
        ConfigError: A block would lie on several ranks.
    """
    view, local = plan.placement.view_shape, plan.placement.local_view_shape(at)
    cuts = sorted((dim, axis) for axis, dim in plan.placement.splits if at.size(axis) > 1)
    run = stride = max(1, math.prod(local))
    offset = sum(at.rank(axis) * local[dim] * math.prod(view[dim + 1 :]) for dim, axis in cuts)
    if cuts:
        inner, axis = cuts[-1]
        if any(math.prod(view[:dim]) > 1 for dim, _ in cuts[:-1]):
            raise AssertionError(f"expected one cut behind the first dim of {plan.name}, got {cuts}")
        run, stride = math.prod(local[inner:]), math.prod(view[inner:])
        if run % BLOCK:
            raise ConfigError(_cut_problem(plan, axis, at.size(axis), run))
    if owned.numel and owned.start % BLOCK:
        raise ConfigError(
            f"optim.moment_dtype: float8 keeps {BLOCK} elements in a block, and slices of {plan.name} are "
            f"cut at other multiples ({owned.start}); set fsdp.granule = elements and a multiple of {BLOCK} "
            "for fsdp.granule_size (or drop both), or choose bfloat16"
        )
    return Place(zlib.crc32(plan.name.encode()) >> 1, owned.start, run, stride, offset)


def _cut_problem(plan: ParamPlan, axis: Axis, size: int, run: int) -> str:
    return (
        f"optim.moment_dtype: float8 keeps {BLOCK} elements in a block, but mesh.{axis} = {size} leaves "
        f"{run} side by side of {plan.name} {plan.placement.global_shape}; expected a multiple of "
        f"{BLOCK}, choose another mesh.{axis}, or bfloat16"
    )


def exponents_placement(placement: Placement) -> Placement:
    """How the exponents of a parameter's blocks are cut: as it is, with the fewest last dims that hold whole
    blocks folded into one."""
    shape = placement.global_shape
    folded: tuple[int, ...] = (num_blocks(math.prod(shape)),)
    for kept in range(len(shape)):
        if math.prod(shape[kept:]) % BLOCK == 0:
            folded = (*shape[:kept], math.prod(shape[kept:]) // BLOCK)
    # An axis of one rank may be named for a dim that is gone now; one of more has been refused by then.
    cuts = tuple(
        (axis, cut)
        for axis, cut in placement.cuts
        if cut.dim < len(folded) and folded[cut.dim] % split_factor(cut) == 0
    )
    return Placement(folded, cuts)
