"""A sharded model's weights for an inference engine: whole tensors in Hugging Face names, a bucket at a time.

For reinforcement learning and the like, where the trainer sends its weights to a server every few steps. No
rank ever holds more than a bucket and one gathered parameter::

    for bucket in fsdmoe.iterate_weights(model, dtype=torch.bfloat16):
        server.load_weights(bucket.items())

To another process: :mod:`fsdmoe.huggingface.refit_link`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.adapter_names import is_adapter_name
from fsdmoe.checkpoint.disk_names import (
    NAMES_AS_IN_MEMORY,
    Convention,
    architectures_of,
    config_as_held,
    disk_names,
    names_to_read,
)
from fsdmoe.checkpoint.gpt_oss import on_disk
from fsdmoe.checkpoint.hf_export import KEEP_DTYPE
from fsdmoe.checkpoint.parts import model_state, refuse_codes
from fsdmoe.checkpoint.quantised import is_projection, quantise
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Placement
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.huggingface.kept_float32 import names_in_float32
from fsdmoe.huggingface.lora import has_factors
from fsdmoe.huggingface.peft_modules import modules_to_save
from fsdmoe.mesh import Axis
from fsdmoe.models.config import ModelConfig

NameKind = Literal["disk", "memory"]
Experts = Literal["all", "mine"]


def iterate_weights(
    model: nn.Module,
    *,
    names: NameKind = "disk",
    experts: Experts = "all",
    dtype: torch.dtype | Literal["fp8_blocks"] | None = None,
    bucket_bytes: int = 1 << 30,
) -> Iterator[dict[str, Tensor]]:
    """Buckets of whole tensors by name, the same on every rank. Collective: exhaust it on all of them alike.

    Args:
        model: From ``parallelize``.
        names: ``disk`` as in a folder of safetensors (each expert on its own), which is what inference
            engines read, or ``memory`` as in the model's ``state_dict`` (fused).
        experts: ``all``; or ``mine``, only those of this rank's EP part, for servers with the same EP. They
            are gathered over ``edp`` alone, and fused tensors (``memory``) are then this rank's slice.
        dtype: What floating-point weights are cast to; None keeps each one's own. ``fp8_blocks`` gives the
            projections of attention and MLPs in DeepSeek-V3's format: float8_e4m3fn, and next to each
            ``weight`` a ``weight_scale_inv`` in fp32, one number for a block of 128 x 128; the rest in
            bfloat16. What the model keeps in float32 (biases that choose experts) is not cast.
        bucket_bytes: A bucket is closed before it would exceed this.

    Yields:
        Name to tensor. No rank holds more than a bucket and one gathered parameter.
    """
    if dtype == "fp8_blocks" and names == "memory":
        raise ConfigError(
            "dtype: expected names = 'disk' for fp8_blocks, whose experts are matrices, got 'memory'"
        )
    bucket: dict[str, Tensor] = {}
    size = 0
    is_kept = names_in_float32(model)
    for name, value in _named_tensors(model, names, experts):
        entries = {name: value} if is_kept(name) else _converted(name, value, dtype)
        num_bytes = sum(entry.nbytes for entry in entries.values())
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        # A view would keep its parameter.
        bucket |= {n: entry.clone() if entry._base is not None else entry for n, entry in entries.items()}
        size += num_bytes
    if bucket:
        yield bucket


def _converted(
    name: str, value: Tensor, dtype: torch.dtype | Literal["fp8_blocks"] | None
) -> dict[str, Tensor]:
    """The tensor, or the tensors, that a weight becomes."""
    if dtype is None or not value.is_floating_point() or name.endswith(KEEP_DTYPE):
        return {name: value}
    if dtype != "fp8_blocks":
        return {name: value.to(dtype)}
    if is_projection(name, value.shape):
        fp8, scale = quantise(value)
        return {name: fp8, f"{name}_scale_inv": scale}
    return {name: value.to(torch.bfloat16)}


def _named_tensors(model: nn.Module, names: NameKind, experts: Experts) -> Iterator[tuple[str, Tensor]]:
    _refuse_adapters(model)
    refuse_codes(model, "is sent")
    state = model_state(model)
    convention = NAMES_AS_IN_MEMORY if names == "memory" else _convention(model, state)
    for name, tensor in state.items():
        if is_adapter_name(name):
            continue
        whole, first_expert = _gathered(tensor, experts)
        if names == "memory":
            yield name, whole
            continue
        for piece in convention.to_disk(name, tuple(tensor.shape)):
            if piece.form != "plain":
                yield piece.disk, on_disk(whole, piece.form)
                continue
            low = tuple(p - f for p, f in zip(piece.low, (first_expert, 0, 0), strict=False))
            if not low or 0 <= low[0] < max(whole.shape[0], 1):
                part = whole[tuple(slice(a, a + n) for a, n in zip(low, piece.sizes, strict=True))]
                yield piece.disk, part.reshape(piece.disk_shape)


def _convention(model: nn.Module, held: Container[str]) -> Convention:
    """How inference engines name the model's weights; a module that is no model of transformers or ours keeps
    its names. Two tensors that are held, each with values of its own, are not tied, whatever the
    configuration says."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        stated = {"model_type": config.architecture, "num_hidden_layers": config.num_hidden_layers}
        return disk_names(stated, native=True)
    if not hasattr(config, "to_dict"):
        return NAMES_AS_IN_MEMORY
    stated = config.to_dict() | architectures_of(model, config)
    names = names_to_read(stated)
    as_held = config_as_held(stated, names, held)
    return names if as_held is stated else names_to_read(as_held)


def _refuse_adapters(model: nn.Module) -> None:
    """Adapters that are not merged would be missing from what the engine gets."""
    for name, module in model.named_modules():
        if has_factors(module) and not getattr(module, "merged", False):
            raise ConfigError(
                f"iterate_weights: expected adapters that are merged into their weights, got {name}; call "
                "model.merge_adapter() before, and model.unmerge_adapter() afterwards"
            )
    for name, _ in modules_to_save(model):
        raise ConfigError(
            f"iterate_weights: expected one module at {name}, got the model's own and that of an adapter "
            "(modules_to_save); call model.merge_and_unload() before"
        )


def _gathered(tensor: Tensor, experts: Experts) -> tuple[Tensor, int]:
    """The tensor on every rank (or this EP part of it), and the number of its first expert."""
    if not isinstance(tensor, ShardedTensor):
        return tensor, 0
    placement = tensor.placement
    if experts == "all" or not placement.splits_over(Axis.EP):
        return tensor.full_tensor(), 0
    layout = tensor._layout
    kept = tuple(cut for cut in placement.cuts if cut[0] != Axis.EP)
    num_here = placement.global_shape[0] // layout.meshes.size(Axis.EP)
    here = Placement((num_here, *placement.global_shape[1:]), kept)
    part = ShardedTensor(tensor.piece, here, layout.start, layout.end, layout.meshes, layout.shard_axis)
    return part.full_tensor(), layout.meshes.rank(Axis.EP) * num_here
