"""The ``[context_parallel]`` section, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.context_parallel.exchange import heads_of_ranks
from fsdmoe.errors import ConfigError

Mode = Literal["ring", "all_to_all", "all_gather"]
Varlen = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig:
    """How sequences that are split over ranks (mesh.cp) attend."""

    mode: Mode = "ring"
    """How queries get keys: ring passes keys and values from rank to rank under the attention of the
    previous step; all_to_all exchanges heads for tokens (least traffic, needs heads divisible by mesh.cp);
    all_gather fetches all keys and values at once (short sequences)."""
    dynamic: bool = False
    """Choose the number of ranks for every micro-batch by the lengths of its documents, any power of two up
    to mesh.dp_shard * mesh.cp, instead of mesh.cp for all."""
    varlen: Varlen = "auto"
    """Where sequences are not split: attend inside packed documents by one variable-length call, without work
    across documents (always), or mask whole rows (never). auto: the call on GPUs that compute in 16 bits,
    for decoders of fsdmoe; a row of one document needs neither."""
    max_tokens: int = 8192
    """With dynamic: the most tokens of one micro-batch on one rank, as far as memory for activations goes."""

    def __post_init__(self) -> None:
        problems = [
            f"context_parallel.{key}: expected one of {', '.join(get_args(kind))}, got "
            f"{getattr(self, key)!r}; choose one of them"
            for key, kind in {"mode": Mode, "varlen": Varlen}.items()
            if getattr(self, key) not in get_args(kind)
        ]
        if self.max_tokens < 1:
            problems.append(
                f"context_parallel.max_tokens: expected a positive number, got {self.max_tokens}; write 8192"
            )
        if problems:
            raise ConfigError(*problems)


def check_context_parallel(
    config: ContextParallelConfig,
    *,
    sizes: Iterable[int],
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    tp: int = 1,
) -> None:
    """Refuse what cannot be split, naming the nearest choice that can.

    ``sizes``: every group size that may be used (just mesh.cp, or all of the dynamic ones); heads are those
    of the whole model, which ``tp`` divides.
    """
    problems: list[str] = []
    sizes = tuple(sizes)
    if config.mode == "all_to_all":
        for size in sizes:
            try:
                heads_of_ranks(num_heads // tp, num_kv_heads // tp, size)
            except ConfigError as error:
                problems.extend(error.problems)
    step = max(sizes) * tp
    if not config.dynamic and seq_len % step:
        below, above = seq_len // step * step, -(-seq_len // step) * step
        problems.append(
            f"data.seq_len: expected a multiple of mesh.cp * mesh.tp = {step}, got {seq_len}; "
            f"choose {above if below == 0 else f'{below} or {above}'}"
        )
    if config.dynamic and seq_len > max(sizes) * config.max_tokens:
        problems.append(
            f"context_parallel.max_tokens: a document of data.seq_len = {seq_len} tokens does not fit "
            f"{max(sizes)} ranks of {config.max_tokens}; choose {-(-seq_len // max(sizes))} or add ranks"
        )
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
