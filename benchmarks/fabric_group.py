"""One rank of a world that does not exist, whose collectives take the time that a fabric would need.

``fabric`` is a backend of torch.distributed: :func:`emulated_fabric` starts it, and everything built on
process groups runs unchanged. The other ranks are clones of this one, which is rank 0 of every group it is
in: they hold the same shards and the same tokens, and route them alike. So

    gather            the own slice in every place
    reduce            the own values, times the number of ranks
    all-to-all        from every rank what this one keeps for itself, so that the counts of rows and of expert
                      choices that ranks tell each other stay true; the way back fills the rows of others with
                      repetitions of the own ones
    send and receive  what is received in a ring is what was sent

Streams are those of NCCL: an asynchronous collective runs on its group's own stream behind the caller's, a
synchronous one on the caller's; and those of one group never overlap, as those of one communicator do not. On
a CPU nothing takes time; every transfer is recorded either way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fabric import Fabric, Load, Place
from fabric_kernel import Timed

from fsdmoe.core.rank_facts import RankFacts
from fsdmoe.mesh import MeshConfig, Meshes, resolve_degrees
from fsdmoe.observe.exposed import kind_of_traffic


@dataclass(frozen=True)
class Record:
    """One transfer, as the fabric saw it."""

    kind: str
    collective: str
    ranks: int
    load: Load
    seconds: float


@dataclass
class World:
    """What all groups of an emulated world share."""

    fabric: Fabric
    records: list[Record] = field(default_factory=list)
    hides_rows: bool = True
    """False: whoever exchanges rows waits for them, for comparison."""
    timed: Timed | None = None

    def device_side(self, device: torch.device) -> Timed:
        if self.timed is None:
            self.timed = Timed(device)
        return self.timed

    def unseen(self, nbytes: float) -> list[Record]:
        """What rows put on the links that only the device counted; their transfers are recorded already."""
        seconds = 0.0 if self.fabric.is_free else nbytes / self.fabric.nvlink
        return [Record("all_to_all", "rows", 0, Load(nbytes), seconds)] if nbytes else []

    @property
    def num_sms(self) -> int | None:
        return None if self.fabric.is_free else self.fabric.num_sms


_kind = functools.cache(kind_of_traffic)
_world: World | None = None  # torch makes the groups, and hands their makers nothing of ours


class _Transfer(dist._Work):
    """Holds its tensors until it is waited for, so that their memory is not reused before."""

    def __init__(self, tensors: Sequence[torch.Tensor], done: torch.cuda.Event | None) -> None:
        super().__init__()
        self._tensors: Sequence[torch.Tensor] = tensors
        self._done = done

    def wait(self, *_: Any) -> bool:
        if self._done is not None:
            self._done.wait()
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class FabricGroup(dist.ProcessGroup):
    """A group of clones. Methods carry torch's names, of 2.11 and of 2.13."""

    supports_coalescing = False

    def __init__(self, world: World, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        if rank != 0:
            raise AssertionError(f"expected the first rank of every group, got rank {rank} of {ranks}")
        self._world = world
        self._place = Place(tuple(ranks), rank, world.fabric.domain)
        self._stream: torch.cuda.Stream | None = None
        self._reached: torch.cuda.Event | None = None
        self._last: torch.cuda.Event | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_is_captured = False
        self._sent: list[torch.Tensor] = []
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return "fabric"

    # torch keeps both in a group's C++ backends, of which this one has none.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # What each collective means among clones

    def all_gather_single(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> _Transfer:
        return self._run("all_gather", self._place.passed_on(out.nbytes), opts, out=out, own=own)

    def allgather(self, outs: Any, owns: Any, opts: Any = None) -> _Transfer:
        (slots,), (own,) = outs, owns
        load = self._place.passed_on(sum(slot.nbytes for slot in slots))
        return self._run("all_gather", load, opts, outs=slots, own=own)

    def reduce_scatter_single(self, out: torch.Tensor, full: torch.Tensor, opts: Any = None) -> _Transfer:
        own, load = full.reshape(-1)[: out.numel()], self._place.passed_on(full.nbytes)
        return self._run("reduce_scatter", load, opts, out=out, own=own, summed=True)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Transfer:
        (tensor,) = tensors
        return self._run("all_reduce", self._place.reduced(tensor.nbytes), opts, out=tensor, summed=True)

    def broadcast(self, tensors: Any, opts: Any = None) -> _Transfer:
        (tensor,) = tensors
        return self._run("broadcast", self._place.copied(tensor.nbytes), opts, out=tensor)

    def all_to_all_single(
        self, out: torch.Tensor, full: torch.Tensor, receive: Sequence[int], send: Sequence[int],
        opts: Any = None,
    ) -> _Transfer:  # fmt: skip
        size = self.size()
        name = "all_to_allv" if send else "all_to_all"
        receive = receive or [out.shape[0] // size] * size
        send = send or [full.shape[0] // size] * size
        row = full[:1].nbytes or out[:1].nbytes  # a rank may only receive
        load = self._place.exchanged([row * n for n in send], [row * n for n in receive])
        own = full[: send[0]] if send[0] else full
        return self._run(name, load, opts, out=out, own=own)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _Transfer:
        self._sent += tensors
        return _Transfer(tensors, None)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _Transfer:
        (tensor,) = tensors
        own = self._sent.pop(0) if self._sent else None
        return self._run("send", self._place.copied(tensor.nbytes, peer), None, out=tensor, own=own)

    def barrier(self, opts: Any = None) -> _Transfer:
        return _Transfer((), None)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # How one is run

    def _run(
        self, collective: str, load: Load, opts: Any, *, out: torch.Tensor | None = None,
        outs: Sequence[torch.Tensor] = (), own: torch.Tensor | None = None, summed: bool = False,
    ) -> _Transfer:  # fmt: skip
        outs = outs if out is None else (out,)
        kind = _kind(collective, self._description)
        seconds = self._world.fabric.seconds(load, leaves_node=self._place.leaves_node)
        self._world.records.append(Record(kind, collective, self.size(), load, seconds))
        is_sum = summed and getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        scale = self.size() if is_sum else 1
        tensors = (*outs, *(() if own is None else (own,)))
        if not outs or outs[0].device.type != "cuda":
            _copy(outs, own, scale)
            return _Transfer(tensors, None)
        caller = torch.cuda.current_stream(outs[0].device)
        is_beside = getattr(opts, "asyncOp", opts is None)
        if kind == "all_to_all" and not self._world.hides_rows:
            is_beside = False
        stream = self._behind(caller) if is_beside else caller
        is_captured = torch.cuda.is_current_stream_capturing()
        # The host waits for the device before and after a capture, whose events are nobody else's.
        if self._last is not None and self._last_stream != stream and self._last_is_captured == is_captured:
            stream.wait_event(self._last)
        self._launch(stream, kind, load, outs, own, scale)
        self._last, self._last_stream = torch.cuda.Event(), stream
        self._last.record(stream)
        self._last_is_captured = is_captured
        return _Transfer(tensors, self._last)  # another stream than the caller's may be the one that waits

    def _behind(self, caller: torch.cuda.Stream) -> torch.cuda.Stream:
        """The group's own stream, behind what the caller's has by now."""
        if self._stream is None or self._reached is None:
            self._stream, self._reached = torch.cuda.Stream(caller.device, priority=-1), torch.cuda.Event()
        self._reached.record(caller)
        self._stream.wait_event(self._reached)
        return self._stream

    def _launch(
        self, stream: torch.cuda.Stream, kind: str, load: Load, outs: Sequence[torch.Tensor],
        own: torch.Tensor | None, scale: int,
    ) -> None:  # fmt: skip
        fabric, first = self._world.fabric, outs[0]
        straight = len(outs) == 1 and first.is_contiguous() and (own is None or own.is_contiguous())
        if not straight:
            with torch.cuda.stream(stream):
                _copy(outs, own, 1)
        costs = (0.0, 0.0, 0.0)
        if not fabric.is_free:
            latency = fabric.network_latency if self._place.leaves_node else fabric.latency
            costs = (load.nvlink / fabric.nvlink, load.network / fabric.network, latency)
        moves = straight and own is not None and own.numel() > 0
        if moves or not fabric.is_free:
            device_side, moved = (
                self._world.device_side(first.device),
                (first, own) if moves else (None, None),
            )
            device_side.run(stream, kind, *moved, num_sms=self._world.num_sms, seconds=costs)
        if scale == 1 and (own is None or own.numel()):
            return
        with torch.cuda.stream(stream):  # which takes the host longer than all of the above
            if straight and own is not None and not own.numel():
                first.zero_()
            if scale != 1:
                for out in outs:
                    out.mul_(scale)


@torch.no_grad()
def _copy(outs: Sequence[torch.Tensor], own: torch.Tensor | None, scale: int) -> None:
    """``outs`` filled with repetitions of ``own``, by plain torch."""
    for out in outs:
        if own is not None and not own.numel():
            out.zero_()
        elif own is not None and out.numel():
            flat = own.reshape(-1)
            times = -(-out.numel() // flat.numel())
            out.copy_(flat.repeat(times)[: out.numel()].view(out.shape))
        if scale != 1:
            out.mul_(scale)


def _create(options: Any, _backend_options: Any) -> FabricGroup:
    assert _world is not None
    ranks = options.global_ranks_in_group or range(options.group_size)
    return FabricGroup(_world, options.group_rank, tuple(ranks))


@contextlib.contextmanager
def emulated_fabric(fabric: Fabric, world_size: int | None = None) -> Iterator[World]:
    """This process is rank 0 of ``world_size`` ranks (the preset's, if not given)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _world
    if not hasattr(dist.Backend, "FABRIC"):
        dist.Backend.register_backend("fabric", _create, extended_api=True, devices=["cpu", "cuda"])
    _world = World(fabric)
    dist.init_process_group("fabric", rank=0, world_size=world_size or fabric.world, store=FakeStore())
    try:
        yield _world
    finally:
        dist.destroy_process_group()
        _world = None


def fabric_meshes(mesh: MeshConfig, device_type: str) -> Meshes:
    """Both meshes over the emulated world, whose nodes are the fabric's."""
    assert _world is not None
    own = RankFacts.own(device_type)._replace(node_size=str(_world.fabric.domain))
    size = dist.get_world_size()
    return Meshes(resolve_degrees(mesh, size), device_type, [own] * size)
