"""How much of the experts' exchanges is left to wait for when rows travel in chunks.

The schedule of :mod:`fsdmoe.experts.routed`, played through: one line of transfers, one of compute, each
chunk computed when it has arrived and sent back when it is computed. Backward is the same read from its end.
"""

from __future__ import annotations

from fsdmoe.experts.dispatch.chunks import chunk_shares


def unhidden(out: float, back: float, compute: float, beside: float, chunks: int) -> float:
    """Seconds that exchanges add to a layer's compute. ``out``, ``back``: all rows on their way to the
    experts and home; ``compute``: the experts; ``beside``: what is computed while the first rows travel."""
    shares = chunk_shares(chunks)
    whole = sum(shares)
    links = work = 0.0  # when either is free
    arrived: list[float] = []

    def send() -> None:
        nonlocal links
        if len(arrived) < chunks:
            links = max(links, work) + out * shares[len(arrived)] / whole
            arrived.append(links)

    send()
    send()
    work = beside
    for number, share in enumerate(shares):
        work = max(work, arrived[number]) + compute * share / whole
        links = max(links, work) + back * share / whole
        send()
    return max(links, work) - compute - beside
