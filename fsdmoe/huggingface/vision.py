"""Vision towers: all ranks run one as often as the rank that needs it most.

Units are gathered and reduced by all ranks together, so a rank whose rows have no image must run the tower
too while others encode theirs. It encodes a blank image of the smallest size and adds the result, times zero,
to its token embeddings: the tower's weights get gradients of zero from it. How often a tower is run is agreed
upon in one small exchange before each forward, so a step of text alone costs no vision at all::

    rank 0   tokens  2 images                  embed -> encode 2 images -> decoder layers
    rank 1   tokens                            embed -> encode a blank  -> decoder layers
    rank 2   tokens  1 image   1 video         embed -> image -> video  -> decoder layers     (all: twice)

Known are the towers of the Qwen-VL families: ``visual(pixels, grid_thw)`` next to a ``language_model``.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.fsdp.outputs import tensors_of
from fsdmoe.mesh import Axis, Meshes

logger = logging.getLogger(__name__)

_INPUTS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""The tower is run once for each of these that a call has; with the sizes that come with it."""


def run_towers_alike(model: nn.Module, meshes: Meshes) -> None:
    """Let every rank run the vision tower of ``model`` as often as any rank does."""
    if meshes.size(Axis.WORLD) == 1 or not any(name in _parameters(model.forward) for name in _INPUTS):
        return
    owners = [module for module in model.modules() if _has_known_tower(module)]
    for owner in owners:
        _Tower(owner, meshes)
    if not owners and meshes.rank(Axis.WORLD) == 0:
        logger.warning(
            "%s takes images by a vision tower that is not known: in every step all ranks must have some, "
            "or none",
            type(model).__name__,
        )


class _Tower:
    def __init__(self, owner: nn.Module, meshes: Meshes) -> None:
        self._visual: Any = owner.visual
        self._meshes = meshes
        self._order = list(_parameters(owner.forward))
        self._num_blanks = 0
        """How often this rank has to run it without an image, in the forward under way."""
        owner.register_forward_pre_hook(self._agree, with_kwargs=True)
        owner.language_model.register_forward_pre_hook(self._encode_blanks, with_kwargs=True)  # type: ignore[union-attr]

    @torch._dynamo.disable
    def _agree(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before any rank encodes: one that waits in the tower's gathers could not take part."""
        given = dict(zip(self._order, args, strict=False)) | kwargs
        for pixels, grid in _INPUTS.items():
            if given.get(pixels) is not None and not given[pixels].numel():  # a batch without rows
                given |= {pixels: None, grid: None}
        num_runs = sum(given.get(pixels) is not None for pixels in _INPUTS)
        most = torch.tensor(num_runs, device=self._meshes.device)
        # Over replicas too: they sum gradients of the same units.
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._meshes.group(Axis.WORLD))
        self._num_blanks = int(most) - num_runs
        return (), given

    @torch._dynamo.disable
    def _encode_blanks(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._num_blanks:
            return None
        embeds: Tensor = kwargs["inputs_embeds"]
        for _ in range(self._num_blanks):
            for encoded in tensors_of(self._visual(*self._blank(embeds.dtype))):
                embeds = embeds + encoded.sum().to(embeds.dtype) * 0
        self._num_blanks = 0
        return args, kwargs | {"inputs_embeds": embeds}

    def _blank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Patches that are merged into one token, and their grid."""
        config, device = self._visual.config, self._meshes.device
        channels = getattr(config, "in_channels", None) or config.in_chans
        side = config.spatial_merge_size
        patch_numel = channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, side, side]], device=device)
        return torch.zeros(side * side, patch_numel, dtype=dtype, device=device), grid


def _has_known_tower(module: nn.Module) -> bool:
    tower, decoder = getattr(module, "visual", None), getattr(module, "language_model", None)
    if not isinstance(tower, nn.Module) or not isinstance(decoder, nn.Module):
        return False
    return "grid_thw" in _parameters(tower.forward)


def _parameters(function: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)
