"""What ``experts.sub_batches`` does not go with."""

from __future__ import annotations

from fsdmoe.config.refusals import Found, refuse
from fsdmoe.config.schema import Config


def check_sub_batches(config: Config) -> None:
    """Refuse what needs the rows of a micro-batch together, with the reason."""
    if config.experts.sub_batches > 1:
        refuse("experts.sub_batches", "1", _found(config))


def _found(config: Config) -> Found:
    experts, memory, train = config.experts, config.memory, config.train
    balance = experts.balance
    if config.model.hf is not None:
        yield "model.hf", config.model.hf, '"none"', "layers of a wrapped model cannot be called in halves"
    if train.micro_batch_size < experts.sub_batches:
        fix, why = str(experts.sub_batches), "each holds whole rows"
        yield "train.micro_batch_size", train.micro_batch_size, fix, why
    if experts.chunks > 1:
        yield "experts.chunks", experts.chunks, "1", "rows travel in sub-batches or in chunks"
    if experts.dispatcher == "flex":
        yield "experts.dispatcher", "flex", '"auto"', "layers of flex share their buffers"
    if config.context_parallel.dynamic:
        yield "context_parallel.dynamic", True, "false", "ranks have different numbers of rows"
    if "layer" in memory.recompute:
        why = "a layer that is run again would have to wait for the layer before it again"
        yield "memory.recompute", list(memory.recompute), "parts of a layer", why
    if memory.offload:
        yield "memory.offload", list(memory.offload), "[]", "inputs of layers are still on their way"
    if train.graphs != "none":
        yield "train.graphs", train.graphs, '"none"', "graphs hold one micro-batch at a time"
    for key in ("record", "replay"):
        if getattr(experts, key) is not None:
            why = "a recording holds one decision a layer and micro-batch"
            yield f"experts.{key}", getattr(experts, key), '"none"', why
    why = "loads of one are not known when another is routed"
    if balance.global_batch:
        yield "experts.balance.global_batch", balance.global_batch, "0 (or use sequence)", why
    if balance.device and balance.device_scope == "global_batch":
        yield "experts.balance.device_scope", balance.device_scope, '"micro_batch"', why
