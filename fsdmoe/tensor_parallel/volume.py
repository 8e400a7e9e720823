"""Bytes that a tensor-parallel layer sends and keeps, as closed formulas.

Counted per layer and rank, one forward; backward sends the same. t tokens of a rank between layers, R ranks,
T = R t tokens inside the layer, d the residual width, b bytes an element.

    layer                      sends                                keeps for backward
    grouped-query attention    2 (R-1) t d b                        T d b + 2 T (H + G) D b / R + 4 T H / R
    latent attention           (R-1) t (q + c + r + d) b
    dense MLP of width n       2 (R-1) t d b                        T d b + 4 T n b / R

H and G query and key-value heads of width D; q, c and r the ranks of the query latent (d without one), of the
key-value latent, and the rotary width. Attention keeps the gathered input, queries, keys and values, its
output and log-sum-exps (q and k norms keep theirs besides); the MLP keeps its input, gate, up, the activated
gate and their product. With b s = T, ``2 (R-1) t d`` is MegaScale-MoE's equation (1).
"""

from __future__ import annotations


def sent_bytes(num_tokens: int, gathered: int, scattered: int, size: int, bytes_per_element: int = 2) -> int:
    """One gather of ``gathered`` and one scatter of ``scattered`` elements a token, of ``num_tokens`` of each
    rank."""
    return (size - 1) * num_tokens * (gathered + scattered) * bytes_per_element
