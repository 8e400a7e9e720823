"""Rows between ranks: three uneven collectives, started now and awaited later, in forward and in backward.

==================  ==============================================  =====================
transfer            forward                                         backward
==================  ==============================================  =====================
``Exchange``        all-to-all-v: a range of rows to each rank      the same, other way
``Gather``          all-gather-v: my rows to every rank             reduce-scatter-v
``ReduceScatter``   reduce-scatter-v: each rank gets its rows' sums   all-gather-v
==================  ==============================================  =====================

Sizes are lists of ints known on the host. Reduce-scatter is an all-to-all whose pieces are added here, in
fp32: it sends exactly what a ring would, takes uneven sizes on every backend, and rounds a bf16 sum once
instead of at every hop.

A transfer is split in two so that work can go on in between::

    AsyncCollective.start(transfer, x)                 collective.wait()  ->  x'
      forward: starts the collective                     forward: waits for it
      backward: waits for the gradient's collective      backward: starts it

Nodes created between the two run, in backward, between the start and the wait of the gradient's collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.compat import ALL_GATHER
from fsdmoe.experts.dispatch.traffic import DispatchTraffic
from fsdmoe.kernels.packed_rows import pack_rows, unpack_rows

Pending = Callable[[], Tensor]
"""A started collective: call it to wait and get the result."""


@dataclass(frozen=True)
class Link:
    """The ranks of one axis, and the counter of what is sent over it."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    traffic: DispatchTraffic

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Pending:
        """All-to-all-v: ``send[i]`` consecutive rows to rank i."""
        rows = rows.contiguous()
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(out, rows, list(receive), list(send), group=self.group, async_op=True)
        self._count(phase, sum(send) - send[self.rank], rows)
        return _Started(work, rows, out)

    def gather(self, rows: Tensor, sizes: Sequence[int], phase: str) -> Pending:
        """All-gather-v: ``sizes[i]`` rows come from rank i."""
        if len(set(sizes)) > 1:  # no backend has a true uneven all-gather
            copies = rows.repeat(self.size, *(1 for _ in rows.shape[1:]))
            return self.exchange(copies, [rows.shape[0]] * self.size, sizes, phase)
        rows = rows.contiguous()
        out = rows.new_empty((sum(sizes), *rows.shape[1:]))
        work = getattr(dist, ALL_GATHER)(out, rows, group=self.group, async_op=True)
        assert work is not None
        self._count(phase, rows.shape[0] * (self.size - 1), rows)
        return _Started(work, rows, out)

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], phase: str) -> Pending:
        """Reduce-scatter-v: the sum over ranks of range i goes to rank i."""
        received = self.exchange(rows, sizes, [sizes[self.rank]] * self.size, phase)

        def summed() -> Tensor:
            pieces = received()
            pieces = pieces.view(self.size, sizes[self.rank], *pieces.shape[1:])
            return pieces.sum(0, dtype=torch.promote_types(pieces.dtype, torch.float32)).to(pieces.dtype)

        return summed

    def _count(self, phase: str, num_rows: int, rows: Tensor) -> None:
        self.traffic.bytes_sent[phase] += num_rows * rows.shape[1:].numel() * rows.element_size()
        self.traffic.calls[phase] += 1


@dataclass
class _Started:
    work: dist.Work
    source: Tensor | None
    """Kept until the collective that reads it is done."""
    out: Tensor

    def __call__(self) -> Tensor:
        self.work.wait()
        self.source = None
        return self.out


class RelayedLink(Link):
    """One whose exchanges are started on one stream and awaited on another."""

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Pending:
        rows = rows.contiguous()
        wait = super().exchange(rows, send, receive, phase)
        if not rows.is_cuda:
            return wait
        sent = [rows]

        def landed() -> Tensor:
            out = wait()
            # Both belong to the stream that started the exchange, which does not wait for this one.
            for each in (sent.pop(), out):
                each.record_stream(torch.cuda.current_stream())
            return out

        return landed


class Transfer:
    """A collective and its transpose over one link."""

    packs = False
    """Rows are sent in eight bits; only where nothing is summed on the way."""
    packs_grad = False
    """So are their gradients, likewise."""

    def __init__(self, link: Link, phase: str) -> None:
        self.link = link
        self.phase = phase

    def forward(self, rows: Tensor) -> Pending:
        raise NotImplementedError

    def backward(self, rows: Tensor) -> Pending:
        raise NotImplementedError

    def forward_all(self, parts: Iterable[Tensor]) -> list[Pending]:
        """Rows, and what is sent with them."""
        return [self.forward(part) for part in parts]

    def backward_all(self, parts: Sequence[Tensor | None]) -> list[Pending | None]:
        """Their gradients; None for what needs none."""
        return [None if part is None else self.backward(part) for part in parts]


class Exchange(Transfer):
    def __init__(self, link: Link, phase: str, send: Sequence[int], receive: Sequence[int]) -> None:
        super().__init__(link, phase)
        self.send, self.receive = send, receive

    def forward(self, rows: Tensor) -> Pending:
        return self.link.exchange(rows, self.send, self.receive, self.phase)

    def backward(self, rows: Tensor) -> Pending:
        return self.link.exchange(rows, self.receive, self.send, f"{self.phase}.backward")


class Gather(Transfer):
    def __init__(self, link: Link, phase: str, sizes: Sequence[int]) -> None:
        super().__init__(link, phase)
        self.sizes = sizes

    def forward(self, rows: Tensor) -> Pending:
        return self.link.gather(rows, self.sizes, self.phase)

    def backward(self, rows: Tensor) -> Pending:
        return self.link.reduce_scatter(rows, self.sizes, f"{self.phase}.backward")


class ReduceScatter(Gather):
    """The transpose."""

    def forward(self, rows: Tensor) -> Pending:
        return self.link.reduce_scatter(rows, self.sizes, self.phase)

    def backward(self, rows: Tensor) -> Pending:
        return self.link.gather(rows, self.sizes, f"{self.phase}.backward")


@dataclass
class _Transit:
    """What the two autograd nodes of a transfer share, and all that they hold.

    Never a tensor with a history: a node that holds a tensor which leads back to the node is a reference
    cycle through C++, which keeps a layer's activations until Python's garbage collector runs.
    """

    transfer: Transfer
    num_ids: int
    """Columns of routing weights and as many of ids; 0 when rows are sent alone."""
    width: int
    dtype: torch.dtype
    """Of a row, as it was before it was packed."""
    needs_grad: tuple[bool, ...] = ()
    outbound: list[Pending] = field(default_factory=list)
    homebound: list[Pending | None] = field(default_factory=list)


@dataclass(frozen=True)
class AsyncCollective:
    """Tensors of a started transfer; for the caller alone, no autograd node may hold it."""

    transit: _Transit
    handle: Tensor
    """Empty; ties the wait to the start in the autograd graph."""

    @classmethod
    def start(
        cls, transfer: Transfer, x: Tensor, weights: Tensor | None = None, ids: Tensor | None = None
    ) -> AsyncCollective:
        """Start moving rows, with their routing weights (fp32) and int32 ids if given."""
        transit = _Transit(transfer, 0 if ids is None else ids.shape[1], x.shape[1], x.dtype)
        return cls(transit, _Start.apply(transit, x, weights, ids))

    def wait(self) -> tuple[Tensor, ...]:
        """What :meth:`start` sent: ``(x,)`` or ``(x, weights, ids)``."""
        return _Wait.apply(self.transit, self.handle)


def _parts(transit: _Transit, x: Tensor, weights: Tensor | None, ids: Tensor | None) -> Iterator[Tensor]:
    """What is sent, each when it is asked for: rows, which take longest, need not wait for their labels."""
    yield pack_rows(x) if transit.transfer.packs else x
    if weights is not None and ids is not None:
        # Weights and ids share a collective: both are 4 bytes wide. They may share memory already.
        bits = weights.view(torch.int32)
        num_ids, end = ids.shape[1], weights.data_ptr() + 4 * weights.shape[1]
        if ids.data_ptr() == end and weights.stride() == ids.stride() == (2 * num_ids, 1):
            yield bits.as_strided((len(ids), 2 * num_ids), (2 * num_ids, 1))
        else:
            yield torch.cat([bits, ids], dim=1)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit: _Transit, x, weights, ids):
        ctx.transit = transit
        transit.needs_grad = ctx.needs_input_grad[1:3]
        transit.outbound = transit.transfer.forward_all(_parts(transit, x, weights, ids))
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _handle):
        transit: _Transit = ctx.transit
        pending, transit.homebound = transit.homebound, []
        dx, dweights = (None if wait is None else wait() for wait in pending)
        if dx is not None and transit.transfer.packs_grad:
            dx = unpack_rows(dx, transit.width, transit.dtype)
        return None, dx, dweights, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit: _Transit, handle):
        ctx.transit = transit
        # Emptied: what a pending collective returns gets this node as its history.
        pending, transit.outbound = transit.outbound, []
        x, *labels = (wait() for wait in pending)
        if transit.transfer.packs:
            x = unpack_rows(x, transit.width, transit.dtype)
        if not labels:
            return (x,)
        bits, ids = labels[0].unflatten(1, (2, transit.num_ids)).movedim(1, 0).contiguous()
        weights = bits.view(torch.float32)
        ctx.mark_non_differentiable(ids)
        return x, weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, dweights=None, _ids=None):
        transit: _Transit = ctx.transit
        sent = pack_rows(dx) if transit.transfer.packs_grad else dx
        gradients = zip((sent, dweights), transit.needs_grad, strict=True)
        # Which gradients are sent follows from what requires one, never from which came here: all
        # ranks must start the same collectives.
        needed = [gradient if is_needed else None for gradient, is_needed in gradients]
        transit.homebound = transit.transfer.backward_all(needed)
        return None, dx.new_empty(0)
