"""Bytes that a tensor-parallel layer sends, as a closed formula.

Counted per layer and rank, one forward; backward sends the same. t tokens of a rank between layers, R ranks,
d the residual width, b bytes an element.

    layer                      sends
    grouped-query attention    2 (R-1) t d b
    latent attention           (R-1) t (q + c + r + d) b
    dense MLP                  2 (R-1) t d b

q, c and r are the ranks of the query latent (d without one), of the key-value latent, and the rotary width.
``2 (R-1) t d`` is MegaScale-MoE's equation (1).
"""

from __future__ import annotations


def sent_bytes(num_tokens: int, gathered: int, scattered: int, size: int, bytes_per_element: int = 2) -> int:
    """One gather of ``gathered`` and one scatter of ``scattered`` elements a token, of ``num_tokens`` of each
    rank."""
    return (size - 1) * num_tokens * (gathered + scattered) * bytes_per_element
