"""Codes of a quantised folder, taken over as they are where frozen weights are kept in the same format.

==========================  ================================================================================
FP8, blocks of 128 x 128    ``precision.frozen_dtype = "float8"``
int4 of compressed-tensors  ``"int4"`` with ``precision.frozen_block`` = the folder's group size
==========================  ================================================================================

Everything else is dequantised a matrix at a time, and quantised again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from fsdmoe.checkpoint.format import Index, StoredTensor
from fsdmoe.checkpoint.quantised import FP8_BLOCK, int4_bytes
from fsdmoe.checkpoint.reader import RegionReader, region_reads
from fsdmoe.checkpoint.tree import Tree, split_tree
from fsdmoe.fsdp.frozen_codes import CodedUnit, CodePlace
from fsdmoe.precision.four_bit import FourBit

Taken = dict[str, tuple[StoredTensor, CodePlace]]
"""By their names in a checkpoint."""


def takeable(unit: CodedUnit, part: Tree, index: Index) -> Taken:
    """The parameters of a unit whose codes are stored as the unit keeps them; ``part``: its tree."""
    places = {id(unit.tensors[name]): place for name, place in unit.places.items()}
    found: Taken = {}
    for name, tensor in split_tree(part)[0].items():
        stored = index.tensors.get(name)
        place = places[id(tensor)]
        if stored is not None and _fits(stored, place):
            found[name] = stored, place
    return found


def _fits(stored: StoredTensor, place: CodePlace) -> bool:
    for box in stored.boxes:
        codes = box.codes
        if codes is None or len(codes.codes.shape) != 2 or box.sizes[-1] != place.shape[-1]:
            return False
        if isinstance(place.scaling, FourBit):
            is_alike = place.scaling == ("int4", codes.block[1]) and codes.codes.dtype == torch.int32
        else:
            is_alike = codes.block == (FP8_BLOCK, FP8_BLOCK) and codes.codes.dtype == torch.float8_e4m3fn
            # A block that begins inside of another one's rows has no scale of its own in the fused weight.
            end = box.offsets[-2] + box.sizes[-2]
            is_alike &= box.offsets[-2] % FP8_BLOCK == 0
            is_alike &= end % FP8_BLOCK == 0 or end == place.shape[-2]
        if not is_alike:
            return False
    return True


def take_codes(reader: RegionReader, taken: Taken) -> None:
    """Write this rank's codes and scales, an expert at a time."""
    for stored, place in taken.values():
        _take(reader, stored, place)


@torch.no_grad()
def _take(reader: RegionReader, stored: StoredTensor, place: CodePlace) -> None:
    is_int4 = isinstance(place.scaling, FourBit)
    matrix = math.prod(place.shape[-2:])
    codes = _raw(stored, "codes")
    scales = _raw(stored, "scales")
    for number in range(place.start // matrix, -(-place.end // matrix)):
        held = max(place.start, number * matrix), min(place.end, (number + 1) * matrix)
        inside = slice(held[0] - number * matrix, held[1] - number * matrix)
        into = slice(held[0] - place.start, held[1] - place.start)
        found = _matrix(reader, codes, place, number)
        if isinstance(place.scaling, FourBit):
            count = place.scaling.factor_numel
            halves = int4_bytes(found).flatten()[inside.start // 2 : inside.stop // 2]
            place.codes[into.start // 2 : into.stop // 2].copy_(halves)
            own = _matrix(reader, scales, place, number).flatten()
            factors = torch.stack([own, torch.zeros_like(own)], -1).flatten()
            blocks = slice(count(into.start), count(into.stop))
            place.scales[blocks].copy_(factors[count(inside.start) : count(inside.stop)])
        else:
            place.codes[into].view(torch.uint8).copy_(found.view(torch.uint8).flatten()[inside])
    if not is_int4:  # whole on every rank
        for number, own in enumerate(place.scales.view(-1, *place.scales.shape[-2:])):
            own.copy_(_matrix(reader, scales, place, number))


def _raw(stored: StoredTensor, which: Literal["codes", "scales"]) -> StoredTensor:
    """The codes, or the scales, of a tensor as one that can be read as it is."""
    boxes = []
    for box in stored.boxes:
        assert box.codes is not None
        own: StoredTensor = getattr(box.codes, which)
        height = box.codes.block[0] if which == "scales" else 1
        *front, row, _ = box.offsets
        offsets = (*front, row // height, 0)
        boxes.append(replace(own.boxes[0], offsets=offsets, sizes=(*(1 for _ in front), *own.shape)))
    rows = -(-stored.shape[-2] // height)
    return StoredTensor(own.dtype, (*stored.shape[:-2], rows, own.shape[-1]), tuple(boxes))


def _matrix(reader: RegionReader, stored: StoredTensor, place: CodePlace, number: int) -> torch.Tensor:
    """One of the local tensor's matrices."""
    front = place.low[:-2]
    low = (*(front[:-1]), front[-1] + number) if front else ()
    out = torch.empty((*(1 for _ in front), *stored.shape[-2:]), dtype=stored.dtype)
    reader.read(region_reads(stored, out, (*low, 0, 0)))
    return out[(0,) * len(front)]
