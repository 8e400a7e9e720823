"""Bytes that attention sends in each mode, as closed formulas; and, in the table, those that it keeps.

Counted per layer and rank, without the weights. *Sent* is what leaves the rank: of a buffer exchanged among
R ranks the R-th part stays on the rank; a gathered (or scattered and reduced) row of T tokens passes R - 1
times. ``b`` is the size of an element, gradients of keys and values are sent in fp32 in ring and all_gather,
log-sum-exps are fp32.

    mode         forward sends               backward sends              keeps
    ring         (R-1) T G(D+E) b            (R-1) T G(D+E) (b + 4)      T (H+G)(D+E) b + 4 T H
    all_gather   (R-1) T G(D+E) b            (R-1) T G(D+E) (b + 4)      T (H+G)(D+E) b + 4 T H
    all_to_all   (R-1) T (h+g)(D+E) b        (R-1) T (h+g)(D+E) b        R T (h+g)(D+E) b + 4 T H

T tokens of a rank, H and G query and key-value heads, D and E widths of keys and values; h = H / R and g the
query and key-value heads of one rank after the exchange (g = G / R where that is whole).

With D = E, width d = H D, m = H / G, R dividing G and T = bs / R, one forward in all_to_all sends
``bsd (R-1)/R * (2 + 2/m)/R`` elements. MegaScale-MoE's equation (2) is forward and backward together, twice
that; its equation (1), ``2 bsd (R-1)/R``, is one forward of tensor parallelism (an all-gather and a
reduce-scatter).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdmoe.context_parallel.config import Mode, heads_of_ranks

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention call of one rank."""

    num_tokens: int
    """Of this rank, all rows together."""
    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    bytes_per_element: int = 2


def sent_bytes(mode: Mode, shape: AttentionShape, size: int) -> tuple[int, int]:
    """What one rank sends in forward and in backward."""
    if mode == "all_to_all":
        forward = (size - 1) * shape.num_tokens * _exchanged_elements(shape, size) * shape.bytes_per_element
        return forward, forward
    key_value_elements = shape.num_kv_heads * (shape.width + shape.value_width)
    elements = (size - 1) * shape.num_tokens * key_value_elements
    return elements * shape.bytes_per_element, elements * (shape.bytes_per_element + _FP32)


def _exchanged_elements(shape: AttentionShape, size: int) -> int:
    """Of one token to one rank: queries, keys, values there, output back."""
    heads = shape.num_heads // size
    kv_heads = len(heads_of_ranks(shape.num_heads, shape.num_kv_heads, size)[0])
    return (heads + kv_heads) * (shape.width + shape.value_width)
