"""What differs between two checkpoints: tensors that only one has, other shapes, and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.tree import SEPARATOR
from fsdmoe.core.errors import ConfigError

_WEIGHTS = f"model{SEPARATOR}"


@dataclass(frozen=True)
class Difference:
    """Of one tensor, in words."""

    name: str
    text: str
    largest: float = float("inf")
    """Infinite where values cannot be compared."""
    is_counter: bool = False
    """One number that is no weight: how many steps an optimizer has done, say."""


def differences(
    first: RegionReader, second: RegionReader, only: Sequence[str] = ()
) -> tuple[list[Difference], int]:
    """Those of all tensors, or of those whose names match a pattern of ``only`` (``*``: anything), and how
    many tensors are the same bits. Weights come first, in each part the largest difference, counters last.
    Reads one tensor of each at a time."""
    found: list[Difference] = []
    num_equal = 0
    tensors = first.index.tensors
    others = second.index.tensors
    names = {*tensors, *others}
    if only:
        names = {name for name in names if any(fnmatchcase(name, pattern) for pattern in only)}
    if not names:
        some = ", ".join(sorted({*tensors, *others})[:3])
        raise ConfigError(
            f"--only: expected a pattern that matches the name of a tensor, got {' '.join(only)}; names are "
            f"such as {some}; quote patterns: --only '{_WEIGHTS}*'"
        )
    for name in sorted(names):
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
        a, b = a.double(), b.double()
        alike = (a == b) | (a.isnan() & b.isnan())  # what is no number is not equal to itself
        if one.dtype == two.dtype and alike.all():
            num_equal += 1
            continue
        apart = (a - b).abs().masked_fill_(alike, 0.0)  # inf - inf is no number
        largest = float(apart.max())
        scale = float(a.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) or 1.0
        share = float((~alike).double().mean())
        text = f"{share:.1%} of elements, at most {largest:.3g} ({largest / scale:.1e})"
        if one.dtype != two.dtype:
            text += f"; {one.dtype} against {two.dtype}".replace("torch.", "")
        is_counter = a.numel() == 1 and not name.startswith(_WEIGHTS)
        # Not a number, where a value is not: nothing is further apart.
        found.append(Difference(name, text, largest if largest == largest else float("inf"), is_counter))
    found.sort(key=lambda each: (each.is_counter, not each.name.startswith(_WEIGHTS), -each.largest))
    return found, num_equal
