"""How the rows of a layer are cut into chunks (``experts.chunks``).

The first dispatch and the last combine have little compute to hide behind. So from three chunks on, the first
and the last have half as many rows as the others. Two chunks are equal.
"""

from __future__ import annotations

from itertools import pairwise


def chunk_shares(chunks: int) -> list[int]:
    """How large chunks are, compared with each other."""
    return [1] * chunks if chunks < 3 else [1, *[2] * (chunks - 2), 1]


def chunk_sizes(num_rows: int, chunks: int) -> list[int]:
    """Rows of each chunk."""
    shares = chunk_shares(chunks)
    ends = [num_rows * sum(shares[:number]) // sum(shares) for number in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]


def chunk_limits(num_rows: int, chunks: int) -> list[int]:
    """The most rows of each chunk, of ranks that have so many or fewer."""
    shares = chunk_shares(chunks)
    return [-(-num_rows * share // sum(shares)) for share in shares]
