"""gpt-oss on disk and in the native decoder: the same numbers in another order.

==============================  ==========================================  =================================
parameter                       on disk, and in transformers                in the native decoder
==============================  ==========================================  =================================
``experts.gate_up_proj``        ``[E, H, 2I]``, gate, up, gate, up, …       ``[E, 2I, H]``, gates before ups
``experts.gate_up_proj_bias``   ``[E, 2I]``, gate, up, gate, up, …          ``[E, 2I]``, gates before ups
``experts.down_proj``           ``[E, I, H]``                               ``[E, H, I]``
``mlp.router``                                                              ``mlp.gate``
==============================  ==========================================  =================================

The decoder has what its kernels read, which is what all other families have. So a checkpoint is of one of the
two: what loads it looks at the router's name, for the shapes alone may agree.

Released weights are in MXFP4: ``X_blocks [E, N, G, 16]`` holds two numbers of four bits a byte, 32 in a row
of 16 bytes, and ``X_scales [E, N, G]`` the exponent of each such row; ``X`` on disk would be ``[E, 32G, N]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fsdmoe.checkpoint.dtypes import dtype_name
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import StoredTensor

Form = Literal["plain", "swapped", "paired", "paired_swapped"]
"""How a tensor on disk differs from the one in memory: the last two dims swapped; gates and ups in pairs
along the last dim on disk."""

_FORMS: dict[str, Form] = {
    ".experts.gate_up_proj": "paired_swapped",
    ".experts.gate_up_proj_bias": "paired",
    ".experts.down_proj": "swapped",
}
BLOCKS, SCALES = "_blocks", "_scales"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def form_of(name: str) -> Form:
    """Of a parameter of the native decoder."""
    return next((form for ending, form in _FORMS.items() if name.endswith(ending)), "plain")


def in_memory(values: Tensor, form: Form) -> Tensor:
    """A tensor of a folder as the native decoder has it."""
    if form.startswith("paired"):
        values = values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return (values.transpose(-1, -2) if form.endswith("swapped") else values).contiguous()


def on_disk(values: Tensor, form: Form) -> Tensor:
    """The inverse."""
    if form.endswith("swapped"):
        values = values.transpose(-1, -2)
    if form.startswith("paired"):
        values = values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return values.contiguous()


def swapped_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """The shape in memory of what has ``shape`` on disk, or the other way round."""
    return (*shape[:-2], shape[-1], shape[-2]) if form.endswith("swapped") else shape


def dequantise_mxfp4(blocks_ENGB: Tensor, scales_ENG: Tensor) -> Tensor:
    """``[E, 32G, N]`` in bf16, which holds every number of the format."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    # The low half comes first.
    codes = torch.stack((blocks_ENGB & 0x0F, blocks_ENGB >> 4), dim=-1).flatten(-2)
    exponents = scales_ENG.to(torch.int32) - _EXPONENT_BIAS
    values_ENH = torch.ldexp(table[codes.long()], exponents[..., None]).flatten(-2)
    return values_ENH.transpose(-1, -2).to(torch.bfloat16)


def packed_weights(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Names of weights that are in MXFP4, from a folder's tensors; CheckpointError for halves of one."""
    found = sorted(
        {n.removesuffix(BLOCKS).removesuffix(SCALES) for n in tensors if n.endswith((BLOCKS, SCALES))}
    )
    for name in found:
        for half in (name + BLOCKS, name + SCALES):
            if half not in tensors or tensors[half].dtype != torch.uint8:
                got = dtype_name(tensors[half].dtype, half) if half in tensors else "nothing"
                raise CheckpointError(f"{half}: expected bytes of MXFP4 (U8), got {got}")
        blocks, scales = tensors[name + BLOCKS].shape, tensors[name + SCALES].shape
        if len(blocks) != 4 or blocks[3] != 16 or blocks[:3] != scales:
            raise CheckpointError(
                f"{name}: expected blocks [E, N, G, 16] and scales [E, N, G], got {blocks} and {scales}"
            )
    return found


def refuse_other_layout(where: str, names: Iterable[str], config: Any, *, is_native: bool) -> None:
    """Raise where a model of the one layout is to be filled from a checkpoint of the other."""
    family = getattr(config, "architecture" if is_native else "model_type", None)
    endings = {name.partition(".mlp.")[2] for name in names}
    unwanted = "router.weight" if is_native else "gate.weight"
    if family != "gpt_oss" or unwanted not in endings:
        return
    if is_native:
        raise CheckpointError(
            f"{where}: its experts are laid out as transformers has them; expected the native decoder's "
            "layout: convert the Hugging Face folder once with `python -m fsdmoe.checkpoint from-hf` (a "
            "checkpoint of a run with model.hf becomes such a folder by to-hf) and load the result"
        )
    raise CheckpointError(
        f"{where}: its experts are laid out as the native decoder has them; expected transformers' layout: "
        "load a Hugging Face folder, which `python -m fsdmoe.checkpoint to-hf` makes of it"
    )
