"""What differs between two checkpoints: tensors that only one has, other shapes, and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdmoe.checkpoint.reader import RegionReader


@dataclass(frozen=True)
class Difference:
    """Of one tensor, in words; ``largest`` is NaN where values cannot be compared."""

    name: str
    text: str
    largest: float = float("nan")


def differences(first: RegionReader, second: RegionReader) -> tuple[list[Difference], int]:
    """Those of all tensors, the largest first, and how many tensors are the same bits. Reads one tensor of
    each at a time."""
    found: list[Difference] = []
    num_equal = 0
    tensors = first.index.tensors
    others = second.index.tensors
    for name in sorted({*tensors, *others}):
        if name not in tensors or name not in others:
            where = second.name if name not in tensors else first.name
            found.append(Difference(name, f"only in {where}"))
            continue
        one = tensors[name]
        two = others[name]
        if tuple(one.shape) != tuple(two.shape):
            found.append(Difference(name, f"shape {list(one.shape)} against {list(two.shape)}"))
            continue
        a = first.read_tensor(name)
        b = second.read_tensor(name)
        if (one.dtype == two.dtype and torch.equal(a, b)) or not a.numel():
            num_equal += 1
            continue
        apart = (a.double() - b.double()).abs()
        largest = float(apart.max())
        scale = float(a.double().abs().max()) or 1.0
        share = float((apart > 0).double().mean())
        text = f"{share:.1%} of elements, at most {largest:.3g} ({largest / scale:.1e})"
        if one.dtype != two.dtype:
            text += f"; {one.dtype} against {two.dtype}".replace("torch.", "")
        found.append(Difference(name, text, largest))
    return sorted(
        found, key=lambda each: -each.largest if each.largest == each.largest else -1e300
    ), num_equal
