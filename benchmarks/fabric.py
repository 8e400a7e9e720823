"""How long a collective takes on an imagined fabric, by the one formula ``latency + bytes / bandwidth``.

Ranks are numbered node by node. Inside a node (an NVLink domain) a rank sends at ``nvlink``; beyond it, at
``network`` through a card of its own. What a transfer puts on each of the two links of one rank::

    gather, reduce-scatter   n ranks, m of them in this node, F bytes in all
                             NVLink F (n-1)/n;  network the same / m: rings use the cards of all m members
    all-reduce               twice that
    exchange                 what goes to (or comes from, if that is more) others of the node over NVLink, the
                             rest through the rank's own card
    broadcast, send          all bytes over the link that leads there

and its time is ``latency + max(NVLink bytes / nvlink, network bytes / network)``. Links are shared: two
transfers at the same time take turns, so bytes are never carried twice as fast by being sent together.

The presets are fixed, so that figures of different days compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fsdmoe.plan.hardware import FABRICS, GPUS

GIGA = 1e9


class Load(NamedTuple):
    """Bytes that a transfer puts on the two links of one rank."""

    nvlink: float = 0.0
    network: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What connects the ranks."""

    name: str
    nvlink: float
    """Bytes/s of a GPU inside its domain, each way."""
    latency: float
    """Seconds before the first byte, inside a domain."""
    domain: int
    """GPUs of an NVLink domain."""
    network: float
    """Bytes/s of a GPU beyond its domain, each way."""
    network_latency: float
    num_sms: int
    """Multiprocessors that a transfer occupies while it lasts."""
    world: int
    """Ranks, where a run does not say otherwise."""
    is_free: bool = False
    """Nothing takes time; bytes are copied as fast as the GPU can."""

    def seconds(self, load: Load, *, leaves_node: bool) -> float:
        """Of one transfer that has the links to itself."""
        if self.is_free:
            return 0.0
        latency = self.network_latency if leaves_node else self.latency
        return latency + max(load.nvlink / self.nvlink, load.network / self.network)


_NODE = Fabric(
    name="node", nvlink=300 * GIGA, latency=15e-6, domain=8, network=FABRICS["infiniband-ndr"],
    network_latency=30e-6, num_sms=16, world=8,
)  # fmt: skip
FABRICS_BY_NAME: dict[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        _NODE,
        Fabric(**vars(_NODE) | {"name": "nodes", "world": 64}),
        Fabric(**vars(_NODE) | {"name": "nvl72", "nvlink": GPUS["gb200"].nvlink, "domain": 72, "world": 64}),
        Fabric(**vars(_NODE) | {"name": "free", "is_free": True}),
    )
}
"""``node``: 8 H100 or H200. ``nodes``: 8 of these. ``nvl72``: one rack. ``free``: no time at all."""


@dataclass(frozen=True)
class Place:
    """The ranks of one group, and where this process is among them."""

    ranks: tuple[int, ...]
    """Global ranks, in the group's order."""
    own: int
    """This process, in the group."""
    domain: int

    @cached_property
    def is_near(self) -> tuple[bool, ...]:
        """For each rank of the group, whether it is in this rank's node."""
        node = self.ranks[self.own] // self.domain
        return tuple(rank // self.domain == node for rank in self.ranks)

    @cached_property
    def leaves_node(self) -> bool:
        return not all(self.is_near)

    @cached_property
    def num_near(self) -> int:
        return sum(self.is_near)

    def passed_on(self, nbytes: float) -> Load:
        """A gather or a reduce-scatter whose whole is ``nbytes``."""
        size = len(self.ranks)
        others = nbytes * (size - 1) / size
        return Load(others, others / self.num_near if self.leaves_node else 0.0)

    def reduced(self, nbytes: float) -> Load:
        """An all-reduce."""
        once = self.passed_on(nbytes)
        return Load(2 * once.nvlink, 2 * once.network)

    def exchanged(self, sent: Sequence[float], received: Sequence[float]) -> Load:
        """An all-to-all: bytes to each rank, and from each."""

        def links(sizes: Sequence[float]) -> Load:
            near = sum(size for size, is_near in zip(sizes, self.is_near, strict=True) if is_near)
            return Load(near - sizes[self.own], sum(sizes) - near)

        out, back = links(sent), links(received)
        return Load(max(out.nvlink, back.nvlink), max(out.network, back.network))

    def copied(self, nbytes: float, peer: int | None = None) -> Load:
        """To or from one other rank; None: from one to all of them."""
        near = self.is_near[peer] if peer is not None else not self.leaves_node
        return Load(nbytes, 0.0) if near else Load(nbytes if peer is None else 0.0, nbytes)
