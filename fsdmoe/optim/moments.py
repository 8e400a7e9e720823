"""How the moments of each parameter are kept: in which format, and on the device or on the host.

Decided from plans alone, so that a dry run counts what a real run allocates. With one plain format for
everything on the device a group's moments are flat buffers like its main weights; otherwise every parameter
has buffers of its own.

A parameter is kept in eight bits (``float8``, :mod:`fsdmoe.precision.block_floats`) if its *whole* shape says
so, whatever its shards are: matrices of ``MIN_LARGE`` elements or more. The rest (norms, biases) stays in
float32. Blocks of 64 elements are counted from the start of the whole parameter. Slices are cut at multiples
of 64 anyway, so no rank ever holds a part of a block, and nothing is padded for it; a mesh axis that would
cut one is refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Coordinates, Placement, split_factor
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.memory_plan import MomentBytes
from fsdmoe.fsdp.plan import GroupPlan, ParamPlan
from fsdmoe.optim.config import TORCHAO_BLOCKS, TorchaoFormat
from fsdmoe.optim.torchao_moments import has_codes, num_codes
from fsdmoe.precision.block_floats import BLOCK, ElementPlace, num_blocks

MomentFormat = torch.dtype | Literal["float8"] | TorchaoFormat

MIN_LARGE = 4096

# Elements of moments that are copied together: enough for the link's full rate, little against a layer.
CHUNK = 1 << 25
MIN_CHUNKS = 3  # on the device: one that comes, one that is stepped, one that goes
_ALIGN = 256


@dataclass(frozen=True)
class MomentPolicy:
    """What the ``optim`` section says about moments."""

    first: MomentFormat = torch.float32
    second: MomentFormat = torch.float32
    offload: float = 0.0
    """The share of them that lives in host memory."""
    prefetch: float = 0.65
    """Of those, the share that the device has space for."""
    stochastic: bool = False
    """Main weights are rounded to bfloat16 stochastically, by the place of each element in its parameter."""

    @property
    def formats(self) -> tuple[MomentFormat, MomentFormat]:
        return self.first, self.second

    @property
    def is_flat(self) -> bool:
        """Buffers of whole groups will do."""
        return not (self.offload or self.stochastic or any(isinstance(kept, str) for kept in self.formats))

    def of(self, plan: ParamPlan) -> tuple[MomentFormat, MomentFormat]:
        """The formats of one parameter's moments."""
        first, second = (torch.float32 if not _is_kept_so(kept, plan) else kept for kept in self.formats)
        return first, second


def is_large(plan: ParamPlan) -> bool:
    """Whether it is worth keeping a parameter's moments in another way: not those of norms and biases."""
    shape = plan.placement.global_shape
    return len(shape) >= 2 and math.prod(shape) >= MIN_LARGE


def _is_kept_so(kept: MomentFormat, plan: ParamPlan) -> bool:
    if kept == "float8":
        return is_large(plan)
    return kept not in TORCHAO_BLOCKS or has_codes(str(kept), math.prod(plan.placement.global_shape))


def tensor_bytes(kept: MomentFormat, num_elements: int) -> list[int]:
    """Of the tensors that hold a moment of so many elements."""
    if kept == "float8":
        return [num_elements, num_blocks(num_elements)]
    if isinstance(kept, str):
        return [num_codes(kept, num_elements), 4 * (num_elements // TORCHAO_BLOCKS[kept])]
    return [num_elements * kept.itemsize]


def host_choice(groups: Sequence[GroupPlan], at: Coordinates, policy: MomentPolicy) -> list[list[bool]]:
    """Which parameters' moments live in host memory, by group: from the last one backwards, so that they have
    the longest part of the next forward to be stepped in; within half a parameter of the wanted share of
    bytes."""
    sizes = [
        [
            sum(sum(tensor_bytes(kept, owned.numel)) for kept in policy.of(plan))
            for plan, owned in _owned(g, at)
        ]
        for g in groups
    ]
    owed = policy.offload * sum(map(sum, sizes))
    chosen = [[False] * len(group.params) for group in groups]
    for number in reversed(range(len(groups))):
        for index in reversed(range(len(sizes[number]))):
            size = sizes[number][index]
            if size and is_large(groups[number].params[index]) and owed >= size / 2:
                chosen[number][index] = True
                owed -= size
    return chosen


def moment_bytes(policy: MomentPolicy) -> Callable[[Sequence[GroupPlan], Coordinates], MomentBytes]:
    """For :func:`fsdmoe.fsdp.memory_plan.plan_memory`."""

    def count(groups: Sequence[GroupPlan], at: Coordinates) -> MomentBytes:
        if policy.is_flat:
            numel = sum(group.layout.slice_numel for group in groups)
            return MomentBytes(sum(sum(tensor_bytes(kept, numel)) for kept in policy.formats))
        held = {False: 0, True: 0}
        for group, on_host in zip(groups, host_choice(groups, at, policy), strict=True):
            check_slices(group, policy)
            for (plan, owned), is_away in zip(_owned(group, at), on_host, strict=True):
                formats = policy.of(plan)
                place_of_moments(plan, owned, at, policy)  # refuses what a real run refuses
                held[is_away] += sum(sum(tensor_bytes(kept, owned.numel)) for kept in formats)
        return MomentBytes(held[False], held[True], ring_bytes(groups, at, policy))

    return count


def ring_bytes(groups: Sequence[GroupPlan], at: Coordinates, policy: MomentPolicy) -> int:
    """Of the device memory that moments in host memory are stepped in."""
    largest = total = 0
    for group, on_host in zip(groups, host_choice(groups, at, policy), strict=True):
        for (plan, owned), is_away in zip(_owned(group, at), on_host, strict=True):
            if is_away:
                formats = policy.of(plan)
                total += sum(n for kept in formats for n in tensor_bytes(kept, owned.numel))
                sizes = [n for kept in formats for n in tensor_bytes(kept, min(owned.numel, CHUNK))]
                largest = max(largest, sum(map(aligned, sizes)))
    return max(MIN_CHUNKS * largest, aligned(round(policy.prefetch * total)))


def aligned(num_bytes: int) -> int:
    """So that what comes next to it can be read 16 bytes at a time."""
    return -(-num_bytes // _ALIGN) * _ALIGN


def _owned(group: GroupPlan, at: Coordinates) -> Iterator[tuple[ParamPlan, OwnedRange]]:
    return zip(group.params, group.layout.owned(at.rank(group.axis)), strict=True)


def place_of_moments(
    plan: ParamPlan, owned: OwnedRange, at: Coordinates, policy: MomentPolicy
) -> ElementPlace | None:
    """:func:`place_of`, or none where nothing depends on it."""
    formats = policy.of(plan)
    if not policy.stochastic and all(isinstance(kept, torch.dtype) for kept in formats):
        return None
    return place_of(plan, owned, at, TORCHAO_BLOCKS.get(str(formats[0]), BLOCK))


def place_of(plan: ParamPlan, owned: OwnedRange, at: Coordinates, block: int = BLOCK) -> ElementPlace:
    """Where a rank's elements lie in the whole parameter, of which ``block`` belong together.

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
        if run % block:
            raise ConfigError(_cut_problem(plan, f"mesh.{axis} = {at.size(axis)}", run, block))
    if owned.numel and owned.start % BLOCK:  # parameters and slices are aligned to as much, in every layout
        raise AssertionError(f"expected a slice of {plan.name} to begin at a block, got {owned.start}")
    return ElementPlace(zlib.crc32(plan.name.encode()) >> 1, owned.start, run, stride, offset)


def check_slices(group: GroupPlan, policy: MomentPolicy) -> None:
    """Refuse slices that cut blocks of torchao's; on every rank alike, whichever slice is its own.

    Raises:
        ConfigError: A slice ends within a block.
    """
    length = group.layout.slice_numel
    for plan, segment in zip(group.params, group.layout.segments, strict=True):
        block = TORCHAO_BLOCKS.get(str(policy.of(plan)[0]), 1)
        ends = range(-(-(segment.start + 1) // length) * length, segment.end, length)
        # Slices are of one length: if the first two end at blocks, all do.
        cut = next(((end - segment.start) % block for end in ends[:2] if (end - segment.start) % block), 0)
        if cut:
            raise ConfigError(_cut_problem(plan, "fsdp.granule_size", cut, block))


def _cut_problem(plan: ParamPlan, key: str, run: int, block: int) -> str:
    own = "float8 (and precision.main_rounding: stochastic, optim.ema.dtype: bfloat16)"
    kept = own if block == BLOCK else "torchao"
    advice = "bfloat16 (and nearest)" if block == BLOCK else "float8"
    return (
        f"optim.moment_dtype: {kept} keeps {block} elements in a block, but {key} leaves {run} side by side "
        f"of {plan.name} {plan.placement.global_shape}; expected a multiple of {block}, choose another "
        f"{key.partition(' ')[0]}, or {advice}"
    )


def blocks_placement(placement: Placement, block: int = BLOCK) -> Placement:
    """How what there is one of for each block is cut: as the parameter, with the fewest last dims that hold
    whole blocks folded into one."""
    shape = placement.global_shape
    folded: tuple[int, ...] = (-(-math.prod(shape) // block),)
    for kept in range(len(shape)):
        if math.prod(shape[kept:]) % block == 0:
            folded = (*shape[:kept], math.prod(shape[kept:]) // block)
    # An axis of one rank may be named for a dim that is gone now; one of more has been refused by then.
    cuts = tuple(
        (axis, cut)
        for axis, cut in placement.cuts
        if cut.dim < len(folded) and folded[cut.dim] % split_factor(cut) == 0
    )
    return Placement(folded, cuts)
