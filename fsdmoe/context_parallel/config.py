"""The ``[context_parallel]`` section, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.context_parallel.planner import check_fits
from fsdmoe.core.axes import Axis
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import at_least, nearest_divisors, one_of

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
    for decoders of fsdmoe, and wrapped ones that a trial shows to follow it; a row of one document needs
    neither."""
    max_tokens: int = 8192
    """With dynamic: the most tokens of one micro-batch on one rank, as far as memory for activations goes."""

    def __post_init__(self) -> None:
        problems = one_of(
            "context_parallel", vars(self), {"mode": get_args(Mode), "varlen": get_args(Varlen)}
        )
        problems += at_least("context_parallel", vars(self), {"max_tokens": 1})
        refuse(problems)

    @property
    def data_axis(self) -> Axis:
        """Ranks along it read different rows. With ``dynamic`` a whole replica reads the same rows and deals
        their documents."""
        return Axis.DP_OUTER if self.dynamic else Axis.BATCH


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
    if config.dynamic:
        try:
            check_fits(seq_len, max(sizes), config.max_tokens)
        except ConfigError as error:
            problems.extend(error.problems)
    refuse(list(dict.fromkeys(problems)))


def heads_of_ranks(num_heads: int, num_kv_heads: int, size: int) -> list[list[int]]:
    """The key-value heads that each rank needs, equally many on all, in the order of its query heads."""
    if num_heads % num_kv_heads:
        raise AssertionError(f"expected key-value heads that divide {num_heads} heads, got {num_kv_heads}")
    if num_heads % size:
        raise ConfigError(
            f"mesh.cp: context_parallel.mode all_to_all splits {num_heads} heads (of each TP rank) over "
            f"{size} ranks, which does not divide them; choose cp {nearest_divisors(size, num_heads)}, "
            "or context_parallel.mode ring, which takes any size"
        )
    per_rank = num_heads // size
    per_group = num_heads // num_kv_heads
    heads = [[head // per_group for head in range(r * per_rank, (r + 1) * per_rank)] for r in range(size)]
    if per_rank % per_group == 0:
        return [row[::per_group] for row in heads]
    return [row[:1] for row in heads] if per_group % per_rank == 0 else heads
