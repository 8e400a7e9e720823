"""What tensor parallelism can be divided by."""

from __future__ import annotations

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import nearest_divisors


def check_tensor_parallel(
    tp: int, *, heads: tuple[int, ...], vocab_size: int, widths: tuple[int, ...] = (), num_ranks: int = 0
) -> None:
    """Refuse a degree that does not divide what it must, naming the nearest that does, and that divides
    ``num_ranks`` too where they are known."""
    wanted = (*heads, vocab_size, *widths)
    if all(number % tp == 0 for number in wanted):
        return
    dense = f", {' and '.join(map(str, widths))} columns of dense layers" if widths else ""
    raise ConfigError(
        f"mesh.tp: expected a divisor of {' and '.join(map(str, heads))} heads, {vocab_size} tokens of the "
        f"vocabulary{dense}, got {tp}; choose {nearest_divisors(tp, *wanted, num_ranks)}"
    )
