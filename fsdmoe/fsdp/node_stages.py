"""Gathers and reductions over a shard axis that spans nodes, in two stages: between nodes and inside them.

A ring over all ranks of such an axis passes every slice on from rank to rank, and waits for the slowest link
at each of its many hops. In two stages a slice crosses the network once, between ranks in the same place of
their nodes, and is spread over NVLink from there. Two nodes of two ranks, slices ``a b | c d``::

    gather     own      a        b     |  c        d          rank 0, rank 1 | rank 2, rank 3
    across              a . c .  . b . d  |  a . c .  . b . d     the ranks of one place: M slices each
    inside              a b c d, in M gathers: the slices of one node are neighbours in the result

    reduce     inside   M reductions: this rank's slice of every node, summed over its own node
    across              one reduction: the same summed over nodes

Results are those of one collective over the axis: gathers to the last bit, sums up to their order. Between
the stages lie M slices, in a buffer that all units share.
"""

from __future__ import annotations

from functools import partial

import torch

from fsdmoe.compat import all_gather, reduce_scatter
from fsdmoe.fsdp.buffer import Scratch
from fsdmoe.fsdp.collectives import Stage
from fsdmoe.mesh import NodeGroups


class NodeStages:
    """Both collectives of one axis."""

    def __init__(self, groups: NodeGroups, scratch: Scratch, name: str, largest: int) -> None:
        """``largest``: elements of the largest slice that is sent over this axis."""
        self._inside, self._across = groups
        self._scratch, self._name, self._largest = scratch, name, largest
        self.num_nodes = self._across.size()

    def reserve(self, dtype: torch.dtype) -> None:
        """Have the reductions' buffer now, while memory can still be registered."""
        self._between("reduce", self._largest, dtype)

    def gather(self, full: torch.Tensor, own: torch.Tensor) -> list[Stage]:
        """Every rank's ``own`` into ``full``; ``own`` may be this rank's slice of it."""
        between = self._between("gather", own.numel(), own.dtype)
        blocks = zip(full.chunk(self.num_nodes), between.chunk(self.num_nodes), strict=True)
        across: Stage = partial(all_gather, between, own, self._across)
        return [across, *(partial(all_gather, block, slice_, self._inside) for block, slice_ in blocks)]

    def reduce(self, out: torch.Tensor, full: torch.Tensor) -> list[Stage]:
        """The sum of every rank's ``full``, this rank's slice of it."""
        between = self._between("reduce", out.numel(), full.dtype)
        blocks = zip(full.chunk(self.num_nodes), between.chunk(self.num_nodes), strict=True)
        inside: list[Stage] = [partial(reduce_scatter, sum_, block, self._inside) for block, sum_ in blocks]
        return [*inside, partial(reduce_scatter, out, between, self._across)]

    def _between(self, use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Gathers and reductions are on streams of their own, and must not share it.
        whole = self._scratch(f"{self._name} {use}", self.num_nodes * self._largest, dtype)
        return whole[: self.num_nodes * numel]
