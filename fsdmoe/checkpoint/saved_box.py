"""What is to be written: boxes of global tensors, each with a function that makes its values.

Values are made when a box's turn comes, so that a conversion never holds a whole model; those of a live state
are views of it. Every rank writes some of the boxes, and all of them make up every tensor exactly once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from fsdmoe.checkpoint.blocks import Sink
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Shape, check_tiling
from fsdmoe.checkpoint.safetensors_header import build_header

_BOUNCE_BYTES = 32 << 20
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor that has ``shape`` as a whole."""

    name: str
    shape: Shape
    dtype: torch.dtype
    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, name: str, shape: Shape, dtype: torch.dtype) -> SavedBox:
        return cls(name, shape, dtype, (0,) * len(shape), shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


Boxes = dict[SavedBox, Callable[[], torch.Tensor]]
Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


def no_progress(num_bytes: int) -> None:
    """For those who do not watch."""


def held_boxes(tensors: Mapping[str, torch.Tensor]) -> Boxes:
    """The boxes of a live state that this rank holds."""
    boxes: Boxes = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue
        for item in _create_write_items(name, tensor):
            data: Any = item.tensor_data
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            box = SavedBox(name, tuple(data.size), data.properties.dtype, offsets, sizes)
            boxes[box] = partial(find_tensor_shard, tensor, item.index)
    return boxes


def plain_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of the beginnings of tensors that each rank has whole, for comparing ranks."""
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.detach()
        if type(plain) is not torch.Tensor or not plain.numel():
            continue
        first = plain.flatten()[: _COMPARED_BYTES // plain.element_size()]
        found[name] = zlib.crc32(first.cpu().contiguous().view(torch.uint8).numpy().data)
    return found


def check_whole(boxes: Iterable[SavedBox]) -> None:
    """Every tensor made up of boxes exactly once, or :class:`CheckpointError`."""
    by_name: dict[str, list[SavedBox]] = {}
    for box in boxes:
        by_name.setdefault(box.name, []).append(box)
    for name, found in by_name.items():
        try:
            check_tiling(name, found[0].shape, [(box.offsets, box.sizes) for box in found])
        except ValueError as error:
            raise CheckpointError(f"cannot save {name}: {error}; do all ranks hold their pieces?") from error


def write_safetensors(
    sink: Sink,
    boxes: Boxes,
    names: Callable[[SavedBox], str],
    content: str = "",
    progress: Progress = no_progress,
) -> dict[SavedBox, int]:
    """Write one safetensors file.

    Wider dtypes come first, so that every box is aligned to its own element size.

    Args:
        sink: The open file.
        boxes: What it holds.
        names: The name of each box in the file.
        content: Said in the file's header.
        progress: Called after each box.

    Returns:
        Where each box begins in the file.
    """
    ordered = sorted(boxes, key=lambda box: -box.dtype.itemsize)
    header, starts = build_header([(names(box), box.dtype, box.sizes) for box in ordered], content)
    sink.write(header)
    for box in ordered:
        made = boxes[box]().detach()
        if tuple(made.shape) != box.sizes or made.dtype != box.dtype:
            raise CheckpointError(
                f"{box.name} changed between planning and writing: expected {box.sizes} {box.dtype}, got "
                f"{tuple(made.shape)} {made.dtype}"
            )
        for part in _as_bytes(made):
            sink.write(part)
        progress(box.num_bytes)
    return dict(zip(ordered, starts, strict=True))


def _as_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order, without a copy where it lies so in host memory."""
    if not tensor.numel():
        return
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    with torch.cuda.device(flat.device):  # this thread's own default would be the first GPU
        size = min(_BOUNCE_BYTES, flat.numel())
        bounce = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        for start in range(0, flat.numel(), _BOUNCE_BYTES):
            part = flat[start : start + _BOUNCE_BYTES]
            bounce[: part.numel()].copy_(part)
            yield bounce.numpy().data[: part.numel()]
