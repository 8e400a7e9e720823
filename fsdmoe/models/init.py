"""Initial weights as a function of (seed, parameter name) alone, so that no layout changes them.

A stacked expert parameter is seeded expert by expert, so that a rank that holds a few of 256 experts draws
those only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from fsdmoe.core.placement import Coordinates, Placement, SplitMeshes, placement_of


class Initializer:
    """Fills local parameters (whole, or cut by TP, EP and ETP as their placement says) with their initial
    values."""

    def __init__(self, seed: int, std: float, at: SplitMeshes) -> None:
        self.seed = seed
        self.std = std
        self.at = at

    @torch.no_grad()
    def __call__(self, name: str, parameter: torch.Tensor, out: torch.Tensor) -> None:
        """Write the initial value of ``parameter`` (for its name and placement) into ``out`` of its local
        shape."""
        if name.endswith("bias"):
            out.zero_()
        elif parameter.ndim == 1 and not name.endswith("sinks"):
            out.fill_(1.0)
        else:
            self._draw(name, parameter, out)

    def _draw(self, name: str, parameter: torch.Tensor, out: torch.Tensor) -> None:
        placement = placement_of(parameter, self.at)
        shape = placement.global_shape
        if len(shape) < 3 and not placement.cuts:
            out.copy_(self._normal((name,), shape, out.device))
        elif len(shape) < 3:
            value = self._normal((name,), shape, out.device)
            for box in placement.boxes(self.at):
                box.view_of(out.view(-1)).copy_(box.slice_of(value))
        else:

            def draw(expert: int) -> torch.Tensor:
                return self._normal((name, expert), shape[1:], out.device)

            fill_experts(out, placement, self.at, draw)

    def _normal(self, key: tuple[object, ...], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed_of(self.seed, *key))
        value = torch.empty(shape, device=device, dtype=torch.float32)
        return value.normal_(0.0, self.std, generator=generator)


def leave_to_load(name: str, parameter: torch.Tensor, out: torch.Tensor) -> None:
    """In place of an :class:`Initializer`, where a checkpoint brings all values."""
    out.zero_()


def seed_of(seed: int, *key: object) -> int:
    """A seed for one of many draws, named by ``key``."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fill_experts(
    out: torch.Tensor, placement: Placement, at: Coordinates, draw: Callable[[int], torch.Tensor]
) -> None:
    """Fill a stacked parameter's local part ``out`` expert by expert, so that a rank draws its own only;
    ``draw`` gives one whole expert."""
    boxes, flat = placement.boxes(at), out.view(-1)
    for expert in sorted({e for box in boxes for e in range(box.offsets[0], box.offsets[0] + box.sizes[0])}):
        value = draw(expert)
        for box in boxes:
            here = expert - box.offsets[0]
            if 0 <= here < box.sizes[0]:
                inner = tuple(slice(o, o + n) for o, n in zip(box.offsets[1:], box.sizes[1:], strict=True))
                box.view_of(flat)[here].copy_(value[inner])


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, initialize: Initializer) -> None:
    """Give every meta parameter of an unsharded ``model`` memory on ``device`` and its initial value."""
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in made:
                module.register_parameter(name, made[id(parameter)])
                continue
            full = torch.empty_like(parameter, device=device)
            initialize(f"{module_name}.{name}" if module_name else name, parameter, full)
            fresh = nn.Parameter(full, requires_grad=parameter.requires_grad)
            fresh.__dict__.update(parameter.__dict__)
            made[id(parameter)] = fresh
            module.register_parameter(name, fresh)
    materialize_buffers(model, device)


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers of our own layers (the routers' correction biases) start from zero."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
