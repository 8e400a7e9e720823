"""Weights from a trainer to another process, bucket by bucket: three ways behind one interface.

================  ============================================================================================
a function        called with each bucket, in the trainer's own process: :func:`send_weights` takes it
``GroupLink``     broadcast over a process group that both sides are in (:func:`connect`): other machines, or
                  gloo on a CPU
``MemoryLink``    through memory that both sides map, over a pipe: CUDA IPC handles where the weights are on a
                  GPU, shared memory on a CPU; nothing is copied in between
================  ============================================================================================

On the trainer all ranks gather, and one of them sends::

    link = GroupLink(connect("127.0.0.1:29600", rank=0, size=2)) if dist.get_rank() == 0 else None
    send_weights(model, link, dtype=torch.bfloat16)

and on the other side, as a stream that never holds more than a bucket::

    for bucket in receive_over(connect("127.0.0.1:29600", rank=1, size=2)):
        engine.load_weights(bucket.items())
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.refit import iterate_weights

Bucket = dict[str, Tensor]
PeerGroup = Any
"""A group of :func:`connect`: a backend's own, which ``torch.distributed`` does not know by name."""
Link = Callable[[Bucket | None], object]
"""Takes a bucket, and None behind the last one."""


def send_weights(model: nn.Module, link: Link | None, **options: Any) -> int:
    """Stream the weights of a parallel model to ``link``. Collective.

    Args:
        model: From ``parallelize``.
        link: Where they go; None on ranks that gather with the others and send nothing.
        **options: Those of :func:`fsdmoe.iterate_weights`.

    Returns:
        The bytes that were sent, on every rank.
    """
    num_bytes = 0
    for bucket in iterate_weights(model, **options):
        num_bytes += sum(value.nbytes for value in bucket.values())
        if link is not None:
            link(bucket)
    if link is not None:
        link(None)
    return num_bytes


def connect(
    address: str, *, rank: int, size: int, backend: str = "gloo", timeout: float = 300.0
) -> PeerGroup:
    """A process group of processes that are no part of one ``torchrun``: a trainer's rank and its servers.

    Args:
        address: ``host:port`` that rank 0 listens at.
        rank: Of this process, in this group alone.
        size: How many processes there are.
        backend: ``gloo``, or ``nccl`` for weights on GPUs.
        timeout: Seconds to wait for the others, and for every message.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address: expected host:port, got {address!r}")
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore("refit", dist.TCPStore(host, int(port), size, rank == 0, limit))
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ConfigError(f"backend: expected gloo or nccl, got {backend!r}")


class GroupLink:
    """Broadcasts each bucket as one message, with a header of names, dtypes and shapes before it."""

    def __init__(self, group: PeerGroup, device: torch.device | str = "cpu") -> None:
        self._group, self._device = group, device

    def __call__(self, bucket: Bucket | None) -> None:
        bucket = bucket or {}
        listed = [(n, str(v.dtype).removeprefix("torch."), list(v.shape)) for n, v in bucket.items()]
        header = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
        self._send(torch.tensor([len(header) if bucket else 0]))
        if bucket:
            self._send(header)
            parts = (value.detach().contiguous().flatten().view(torch.uint8) for value in bucket.values())
            self._send(torch.cat([part.to(self._device) for part in parts]))

    def _send(self, message: Tensor) -> None:
        broadcast(message.to(self._device), self._group, self._group.rank())


def receive_over(group: PeerGroup, source: int = 0, device: torch.device | str = "cpu") -> Iterator[Bucket]:
    """The buckets that a :class:`GroupLink` sends from rank ``source`` of the group."""
    while True:
        length = torch.zeros(1, dtype=torch.int64, device=device)
        if not broadcast(length, group, source).item():
            return
        header = torch.empty(int(length), dtype=torch.uint8, device=device)
        listed = json.loads(broadcast(header, group, source).cpu().numpy().tobytes())
        kinds = [(name, getattr(torch, kind), shape) for name, kind, shape in listed]
        sizes = [math.prod(shape) * kind.itemsize for _, kind, shape in kinds]
        payload = broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=device), group, source)
        yield {
            # A tensor of its own: a slice need not begin where its dtype may, and would keep the bucket.
            name: part.clone().view(kind).view(shape)
            for (name, kind, shape), part in zip(kinds, payload.split(sizes), strict=True)
        }


def broadcast(message: Tensor, group: PeerGroup, source: int) -> Tensor:
    """In place, from rank ``source`` of a group that need not be known to ``torch.distributed``."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    group.broadcast([message], options).wait()
    return message


class MemoryLink:
    """Hands each bucket over in place, and waits until the other side has copied what it wants."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, bucket: Bucket | None) -> None:
        self._connection.send(None if bucket is None else {n: v.detach() for n, v in bucket.items()})
        self._connection.recv()


def receive_in_place(connection: Connection) -> Iterator[Bucket]:
    """The buckets that a :class:`MemoryLink` hands over; each is the trainer's own memory until the next."""
    while True:
        bucket = connection.recv()
        if bucket is not None:
            yield bucket
        last, bucket = bucket is None, None  # dropped before the trainer may free or reuse it
        connection.send(True)
        if last:
            return
