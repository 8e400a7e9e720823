"""What a decoder keeps for backward, counted where autograd saves it, on tensors without memory.

The plan (:mod:`fsdmoe.plan`) has formulas for it, which take no time and know every mesh; this is what they
are held to, and what the start of a run says of host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdmoe.config import Config
from fsdmoe.fsdp.memory_plan import saved_activations
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import PlannedOffload
from fsdmoe.models import Decoder
from fsdmoe.models.memory_parts import prepare_parts
from fsdmoe.precision.config import torch_dtype


class TracedBytes(NamedTuple):
    on_device: int
    in_host_memory: int


def traced_activations(config: Config) -> TracedBytes:
    """Kept for backward by one micro-batch. Under EP a rank computes as many rows as it sends, on average, so
    the unsplit layer stands for the split one; so it does, with its tokens, under tensor and context
    parallelism."""
    tokens = config.train.micro_batch_size * config.data.seq_len // (config.mesh.cp * config.mesh.tp)
    if config.context_parallel.dynamic:
        tokens = config.context_parallel.max_tokens // config.mesh.tp
    shape = (config.train.micro_batch_size, max(tokens // config.train.micro_batch_size, 1))
    experts = dataclasses.replace(config.experts, compute="grouped")  # a loop would look at the routing
    dtype = torch_dtype(config.precision.param_dtype)
    with FakeTensorMode():
        model = _with_default_dtype(dtype, lambda: Decoder(config.model, experts))
        tokens_BS = torch.zeros(shape, dtype=torch.int64)

        def kept() -> int:
            return saved_activations(
                lambda: model(tokens_BS, document_ids_BS=tokens_BS, labels_BS=tokens_BS).loss, model
            )

        layers = [*model.model.layers, *model.model.mtp_layers]
        once_more = kept() // len(layers) if "layer" in config.memory.recompute else 0
        prepare_parts(layers, config.memory)
        offload = PlannedOffload(config.memory.offload) if config.memory.offload else None
        keep_less(layers, config.memory, offload)
        on_device = kept() + once_more  # a layer that backward runs again keeps all, one at a time
        return TracedBytes(on_device, 0 if offload is None else offload.nbytes)


def _with_default_dtype(dtype: torch.dtype, build: Callable[[], Decoder]) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)
