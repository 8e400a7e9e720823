"""How much of the experts' exchanges is left to wait for when rows travel in chunks or in sub-batches.

The schedules of :mod:`fsdmoe.experts.routed` and :mod:`fsdmoe.models.sub_batches`, played through: one line
of transfers, one of compute, each part of the rows computed when it has arrived and sent on when it is
computed. Backward of chunks is the same read from its end.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Side(NamedTuple):
    """Half of a layer, attention or experts, in seconds for all rows of a micro-batch."""

    compute: float
    """Of rows that have arrived, before they are sent on."""
    travels: float
    """On the way to the other half."""
    before: float = 0.0
    """Computed before rows are waited for."""
    after: float = 0.0
    """Computed once they are sent."""


LAYERS = 8
"""As many as it takes until each layer is like the one before."""


def unhidden_in_sub_batches(attention: Side, experts: Side, sub_batches: int) -> float:
    """Seconds that exchanges add to the compute of a layer among others like it, forward or backward: while
    rows of one sub-batch travel, either half is computed for others."""
    links = work = halfway = 0.0
    arrived = [0.0] * sub_batches
    for layer in range(LAYERS):
        if layer == LAYERS // 2:
            halfway = work
        for side in (attention, experts):
            for number in range(sub_batches):
                work = max(work + side.before / sub_batches, arrived[number]) + side.compute / sub_batches
                arrived[number] = links = max(links, work) + side.travels / sub_batches
                work += side.after / sub_batches
    compute = sum(side.before + side.compute + side.after for side in (attention, experts))
    return 2 * (work - halfway) / LAYERS - compute
