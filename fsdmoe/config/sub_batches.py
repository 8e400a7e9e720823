"""What ``experts.sub_batches`` does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from fsdmoe.config.schema import Config
from fsdmoe.errors import ConfigError


def check_sub_batches(config: Config) -> None:
    """Refuse what needs the rows of a micro-batch together, with the reason."""
    if config.experts.sub_batches == 1:
        return
    problems = [
        f"experts.sub_batches: {why}, got {key} = {value}; set {key} = {fix}, or experts.sub_batches = 1"
        for key, value, fix, why in _found(config)
    ]
    if problems:
        raise ConfigError(*problems)


def _found(config: Config) -> Iterator[tuple[str, object, str, str]]:
    """Key, its value, the value that sub-batches go with, and why."""
    experts, memory, train = config.experts, config.memory, config.train
    balance = experts.balance
    if config.model.hf is not None:
        yield "model.hf", config.model.hf, "none", "layers of a wrapped model cannot be called in halves"
    if train.micro_batch_size < experts.sub_batches:
        yield (
            "train.micro_batch_size",
            train.micro_batch_size,
            str(experts.sub_batches),
            "each holds whole rows",
        )
    if experts.chunks > 1:
        yield "experts.chunks", experts.chunks, "1", "rows travel in sub-batches or in chunks"
    if experts.dispatcher == "flex":
        yield "experts.dispatcher", '"flex"', '"auto"', "layers of flex share their buffers"
    if config.context_parallel.dynamic:
        yield "context_parallel.dynamic", "true", "false", "ranks have different numbers of rows"
    if "layer" in memory.recompute:
        why = "a layer that is run again would have to wait for the layer before it again"
        yield "memory.recompute", list(memory.recompute), "parts of a layer", why
    if memory.offload:
        yield "memory.offload", list(memory.offload), "[]", "inputs of layers are still on their way"
    if train.compile:
        yield "train.compile", "true", "false", "their order is lost in a compiled layer"
    if train.graphs != "none":
        yield "train.graphs", f'"{train.graphs}"', '"none"', "graphs hold one micro-batch at a time"
    for key in ("record", "replay"):
        if getattr(experts, key) is not None:
            why = "a recording holds one decision a layer and micro-batch"
            yield f"experts.{key}", getattr(experts, key), "none", why
    if balance.global_batch or (balance.device and balance.device_scope == "global_batch"):
        why = "loads of one are not known when another is routed"
        yield "experts.balance.global_batch", balance.global_batch, "0 (or use sequence)", why
