"""Rows written into the memory of other ranks: the transport of ``flex`` within an NVLink domain.

Each rank of a group has one allocation that the others can address (torch's symmetric memory). All layers
share it, and it is made once::

    control   signal pads, two tables of counts                       small, made at the start
    rows      what others deliver: R rows, and their labels          ┐ made by the first layer that runs;
    returned  what comes back: a row for each (token, rank) sent,    │ larger only when larger batches come
              one range for each ETP member; gradients of weights    ┘
    loads     rows for each expert, of every rank: two tables        ┐
    clones    weights in this rank's slots for clones                │ with experts.clones
    grads     their gradients                                        ┘

An exchange is a kernel that writes, a barrier, and a kernel that reads, launched one after the other on a
stream of their own, without a host that waits; see :mod:`fsdmoe.kernels.triton.exchange_rows`. What is read
is copied out at once, so the next exchange may begin after the next barrier: before an area is written that
was read since the last one (``_read``), there is another. The usual order, rows out and rows back, always
has one in between.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.dispatch.base import Links
from fsdmoe.experts.dispatch.flex_transport import FlexPlan, Transport, agree, all_or_none
from fsdmoe.experts.dispatch.transfer import Pending
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.clone_plan import ClonePlan
from fsdmoe.kernels.exchange_plan import Bounds, Places

_ALIGNMENT = 256


class Area(NamedTuple):
    own: Tensor
    """Bytes."""
    addresses: Tensor
    """int64: of every rank's."""
    distances: Tensor
    """int64: to every rank's, in units of 16 bytes."""


class SharedMemory:
    """Areas that all ranks of a group have alike, and can all write to."""

    def __init__(self, sizes: dict[str, int], group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective, and the host waits. :class:`SetupError` on all ranks or on none."""
        self.sizes = sizes
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]
        symmetric_memory, self._tensor = all_or_none(partial(_allocate, sum(padded), device), group, device)
        self._handle = all_or_none(partial(_meet, symmetric_memory, self._tensor, group), group, device)
        self._tensor.zero_()
        starts = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64)
        self.areas: dict[str, Area] = {}
        offset = 0
        for name, size in zip(sizes, padded, strict=True):
            own, addresses = self._tensor[offset : offset + size], starts + offset
            distances = (addresses - addresses[self._handle.rank]).div(16, rounding_mode="floor")
            self.areas[name] = Area(own, addresses.to(device), distances.to(device))
            offset += size
        agree((0,), group, device)  # nobody writes before everybody's memory is zero


def _allocate(num_bytes: int, device: torch.device) -> tuple[ModuleType, Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory  # starts things when it is imported

    return symmetric_memory, symmetric_memory.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)


def _meet(symmetric_memory: ModuleType, tensor: Tensor, group: dist.ProcessGroup) -> Any:
    handle = symmetric_memory.rendezvous(tensor, group.group_name)
    if handle.buffer_ptrs[handle.rank] != tensor.data_ptr():
        raise RuntimeError("expected symmetric memory to begin where its tensor does")
    return handle


class WrittenTransport(Transport):
    """See the module's text."""

    name = "written"

    def __init__(self, links: Links, device: torch.device, blocks: int, seconds: float) -> None:
        super().__init__(links, device)
        assert links.expert.group is not None
        self._group, self._device, self._blocks = links.expert.group, device, blocks
        self._kernels, self._rows, self._clones = all_or_none(partial(_kernels, device), self._group, device)
        sources = self.who.num_sources
        sizes = {"pad": 4 * sources, "table": 8 * sources * self.who.num_counts}
        self._control = self._share(sizes)
        self._table = self._control.areas["table"]
        pad = self._control.areas["pad"]
        self._barrier = self._kernels.Barrier(
            pads=pad.addresses,
            own_pad=pad.own.view(torch.int32),
            number=torch.zeros(1, dtype=torch.int32, device=device),
            missing=torch.zeros(1, dtype=torch.int32, device=device),
            source=self.who.source,
            num_sources=sources,
            limit_ns=int(seconds * 1e9),
        )
        self._stream = torch.cuda.Stream(device, priority=-1)
        """All exchanges and plans, in the order in which they were started, which is the same on all ranks.
        Multiprocessors that become free go to them first, and to the next product after that."""
        areas = ("rows", "labels", "returned", "weights", "loads", "clones", "grads")
        nothing = dict.fromkeys(areas, 0)
        self._memory = self._share(nothing)
        self._read: set[str] = set()
        """Areas that were read since the last barrier."""

    def check(self) -> None:
        self.settle()
        missing = int(self._barrier.missing)
        if missing:
            rank = dist.get_process_group_ranks(self._group)[missing - 1]
            seconds = self._barrier.limit_ns / 1e9
            raise dist.DistNetworkError(
                f"rank {rank} did not answer in an exchange of rows within {seconds:.0f} s"
            )

    def plan(self, ids_TK: Tensor, num_experts: int, bounds: Bounds, *, raises: bool) -> FlexPlan:
        ids_TK.record_stream(self._stream)
        with self._beside():
            return super().plan(ids_TK, num_experts, bounds, raises=raises)

    def settle(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def gather_counts(self, counts_C: Tensor, bounds: Bounds, raises: bool) -> tuple[Tensor, Places]:
        places = self._kernels.gather_counts(
            counts_C, self._table.addresses, self._table.own.view(torch.int32), self._barrier, self.notes,
            bounds, self.who, raises,
        )  # fmt: skip
        self._read.clear()
        self.links.traffic.add("counts", counts_C.numel() * 4 * (self.who.num_sources - 1))
        return counts_C, places

    def deliver(self, plan: FlexPlan, parts: Sequence[Tensor], phase: str) -> list[Pending]:
        rows, labels = parts[0], parts[1] if len(parts) > 1 else None
        num_rows = plan.bounds.rows
        self._reserve(
            rows=num_rows * _row_bytes(rows), labels=0 if labels is None else num_rows * _row_bytes(labels)
        )
        landed = [part.new_empty(num_rows, part.shape[1]) for part in parts]
        missing = self._barrier.missing
        with self._beside():
            self._write_to("rows")
            self._deliver_rows(plan, rows, labels)
            self._wait_for_all()
            self._rows.land_rows(self._memory.areas["rows"].own, landed[0], plan.places, missing)
            if labels is not None:
                first = self.who.ep_rank * plan.experts_per_rank
                buffer = self._memory.areas["labels"].own
                self._rows.land_labels(buffer, landed[1], plan.places, missing, first, plan.experts_per_rank)
            self._read.add("rows")
            done = self._stream.record_event()
        self.links.traffic.add(phase, 0)  # the host does not know how many
        return [_Underway(part, done, parts) for part in landed]

    def collect(self, plan: FlexPlan, parts: Sequence[Tensor | None], phase: str) -> list[Pending | None]:
        rows, weights = parts[0], parts[1] if len(parts) > 1 else None
        # A token is sent to no more EP ranks than it has choices.
        num_kept = plan.bounds.tokens * min(plan.bounds.num_ids, self.who.num_ranks)
        slots = num_kept * self.who.num_members
        self._reserve(
            returned=0 if rows is None else slots * _row_bytes(rows),
            weights=0 if weights is None else slots * _row_bytes(weights),
        )
        summed = [
            None if part is None else part.new_empty(len(plan.index_TP), part.shape[1]) for part in parts
        ]
        with self._beside():
            self._write_to("returned")
            self._return_rows(plan, rows, weights, num_kept)
            self._wait_for_all()
            for out, name in zip(summed, ("returned", "weights"), strict=False):
                if out is not None:
                    buffer = self._memory.areas[name].own
                    self._rows.sum_returned(
                        buffer, out, plan.routes_TC2, plan.places, self._barrier.missing, num_kept, self.who
                    )
            self._read.add("returned")
            done = self._stream.record_event()
        self.links.traffic.add(phase, 0)
        return [None if out is None else _Underway(out, done, parts) for out in summed]

    def gather_loads(self, ends_E: Tensor) -> Tensor:
        num_ranks, num_experts = self.who.num_ranks, len(ends_E)
        self._reserve(loads=2 * 4 * num_ranks * num_experts)
        counts_PE = ends_E.new_empty(num_ranks, num_experts)
        with self._beside():
            table = self._memory.areas["loads"]
            self._kernels.gather_loads(
                ends_E, table.addresses, table.own.view(torch.int32), self._barrier, counts_PE
            )
            self._read.clear()
        self.settle()
        self.links.traffic.add("counts", num_experts * 4 * (num_ranks - 1))
        return counts_PE

    def send_clones(self, clones: ClonePlan, weights: Sequence[Tensor]) -> list[Pending]:
        num_slots = clones.experts_PS.shape[1]
        landed = [each.new_empty(num_slots, *each.shape[1:]) for each in weights]
        ranges = _ranges(landed)
        self._reserve(clones=ranges[-1])
        experts_S = clones.experts_PS[self.who.ep_rank]
        with self._beside():
            self._write_to("clones")
            self._push_clones(clones, weights, ranges)
            self._wait_for_all()
            own = self._memory.areas["clones"].own
            for out, start, end in zip(landed, ranges, ranges[1:], strict=False):
                self._clones.copy_slots(
                    own[start:end], out, experts_S, clones.num_experts, self._barrier.missing,
                    fills=out.dim() == 2,
                )  # fmt: skip
            self._read.add("clones")
            done = self._stream.record_event()
        self.links.traffic.add("clones", 0)
        return [_Underway(out, done, weights) for out in landed]

    def add_clones(
        self, clones: ClonePlan, gradients: Sequence[Tensor], totals: Sequence[Tensor | None]
    ) -> None:
        ranges = _ranges(gradients)
        self._reserve(grads=ranges[-1])
        experts_S = clones.experts_PS[self.who.ep_rank]
        missing = self._barrier.missing
        with self._beside():
            self._write_to("grads")
            own = self._memory.areas["grads"].own
            for gradient, start, end in zip(gradients, ranges, ranges[1:], strict=False):
                area = own[start:end]
                self._clones.copy_slots(gradient.contiguous(), area, experts_S, clones.num_experts, missing)
            self._wait_for_all()
            self._add_clones(clones, totals, ranges)
            self._read.add("grads")
        self.settle()
        self.links.traffic.add("clones.backward", 0)

    def _push_clones(self, clones: ClonePlan, weights: Sequence[Tensor], ranges: Sequence[int]) -> None:
        for weight, start, end in zip(weights, ranges, ranges[1:], strict=False):
            self._clones.push_clones(
                weight.detach(), clones.experts_PS, self._peers("clones", start, end), self.who.ep_rank,
                self._blocks,
            )  # fmt: skip

    def _add_clones(self, clones: ClonePlan, totals: Sequence[Tensor | None], ranges: Sequence[int]) -> None:
        for total, start, end in zip(totals, ranges, ranges[1:], strict=False):
            if total is not None:
                self._clones.add_clones(
                    total, clones.experts_PS, self._peers("grads", start, end), self._barrier.missing,
                    self.who.ep_rank, self._blocks,
                )  # fmt: skip

    def _deliver_rows(self, plan: FlexPlan, rows: Tensor, labels: Tensor | None) -> None:
        self._rows.deliver_rows(
            rows, labels, plan.routes_TC2, plan.places, self._peers("rows"), self._peers("labels"), self.who,
            self._blocks,
        )  # fmt: skip

    def _return_rows(
        self, plan: FlexPlan, rows: Tensor | None, weights: Tensor | None, num_kept: int
    ) -> None:
        offset = num_kept * (self.who.source % self.who.num_members)
        self._rows.return_rows(
            rows, weights, plan.places, self._peers("returned"), self._peers("weights"), offset, self.who,
            self._blocks,
        )  # fmt: skip

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched runs on the exchanges' stream, after all that the current one was given."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _wait_for_all(self) -> None:
        self._kernels.wait_for_all(self._barrier)
        self._read.clear()

    def _write_to(self, area: str) -> None:
        if area in self._read:
            self._wait_for_all()

    def _peers(self, name: str, start: int = 0, end: int | None = None) -> Any:
        area = self._memory.areas[name]
        return self._rows.Peers(area.own[start:end], area.distances)

    def _reserve(self, **needed: int) -> None:
        """Make the areas at least so large. All ranks ask for the same."""
        sizes = self._memory.sizes
        if any(size > sizes[name] for name, size in needed.items()):
            # What others write here has landed once this rank's work is done.
            torch.cuda.synchronize(self._device)
            grown = {name: max(size, needed.get(name, 0)) for name, size in sizes.items()}
            self._memory = self._share(grown)

    def _share(self, sizes: dict[str, int]) -> SharedMemory:
        return SharedMemory(sizes, self._group, self._device)


def _kernels(device: torch.device) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Triton is optional: imported once it is wanted."""
    if triton_for(torch.empty(0, device=device)) is None:
        raise RuntimeError("kernels in Triton are switched off, or not for this device")
    from fsdmoe.kernels.triton import exchange_clones, exchange_kernels, exchange_rows

    return exchange_kernels, exchange_rows, exchange_clones


def _row_bytes(part: Tensor) -> int:
    return part.shape[1] * part.element_size()


def _ranges(slots: Sequence[Tensor]) -> list[int]:
    """Where each begins in an area that holds all of them, and where the last one ends."""
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in slots]
    return [0, *itertools.accumulate(sizes)]


@dataclass
class _Underway:
    """Memory of both tensors belongs to the stream that waits here, which is why the source is kept."""

    out: Tensor
    done: torch.cuda.Event
    source: Sequence[Tensor | None]

    def __call__(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.done)
        self.source = ()
        return self.out
