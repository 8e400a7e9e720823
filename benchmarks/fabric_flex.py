"""The ``flex`` dispatcher on the emulated fabric: rows written into the memory of ranks that are not there.

Everything is the dispatcher's own (plans, barriers, what lands and is summed) but two things. The other
ranks' memory is this rank's, so placed that its own counts and signals stand where those of its clones would;
and instead of being written to others, its own rows are repeated, as :mod:`fabric_group` does it, by a kernel
that takes the time of the rows that the device counted. No host is asked, so a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from fabric import Load
from fabric_group import Record, World
from fabric_kernel import RowsPart, Timed
from torch import Tensor

from fsdmoe.experts.dispatch.base import Links
from fsdmoe.experts.dispatch.flex import FlexDispatcher
from fsdmoe.experts.dispatch.flex_peer import Area, SharedMemory, WrittenTransport
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.experts.dispatch.flex_transport import FlexPlan
from fsdmoe.experts.dispatch.transfer import Pending
from fsdmoe.kernels.clone_plan import ClonePlan
from fsdmoe.kernels.exchange_plan import Bounds, Places, Who

KIND = "all_to_all"


class _OwnMemory(SharedMemory):
    """Areas of this rank alone, with the addresses at which it finds what its clones say."""

    def __init__(self, sizes: dict[str, int], who: Who, device: torch.device) -> None:
        self.sizes = sizes
        strides = {"pad": 4, "table": 4 * who.num_counts}
        strides["loads"] = sizes.get("loads", 0) // (2 * who.num_sources)  # of one layer size alone
        self.areas = {}
        for name, size in sizes.items():
            own = torch.zeros(max(size, 16), dtype=torch.uint8, device=device)
            steps = torch.arange(who.num_sources, device=device) * strides.get(name, 0)
            if name == "clones":  # products of zeros draw less power, and take less time
                # not by the device's own generator: graphs refuse steps that draw from it
                random = torch.Generator(device).manual_seed(1)
                own.view(torch.bfloat16).normal_(std=0.02, generator=random)
            self.areas[name] = Area(own, own.data_ptr() + steps, torch.zeros_like(steps))


class FabricTransport(WrittenTransport):
    """See the module's text. This is rank 0, as everywhere on the fabric."""

    name = "emulated"

    def __init__(self, links: Links, device: torch.device, world: World) -> None:
        self._world = world
        super().__init__(links, device, blocks=world.fabric.num_sms, seconds=60.0)
        if self.who.source != 0 or self.who.num_members != 1:
            raise AssertionError(f"expected the first rank of a group without etp, got {self.who}")
        self._timed: Timed = world.device_side(device)

    def gather_counts(self, counts_C: Tensor, bounds: Bounds, raises: bool) -> tuple[Tensor, Places]:
        found = super().gather_counts(counts_C, bounds, raises)
        self._take_latency()
        return found

    def gather_loads(self, ends_E: Tensor) -> Tensor:
        found = super().gather_loads(ends_E)
        self._take_latency()
        self.settle()
        return found

    def _take_latency(self) -> None:
        fabric = self._world.fabric
        if not fabric.is_free:
            self._timed.run(self._stream, KIND, None, None, num_sms=1, seconds=(0.0, 0.0, fabric.latency))

    def deliver(self, plan: FlexPlan, parts: Sequence[Tensor], phase: str) -> list[Pending]:
        found = super().deliver(plan, parts, phase)
        self._hold()
        return found

    def collect(self, plan: FlexPlan, parts: Sequence[Tensor | None], phase: str) -> list[Pending | None]:
        found = super().collect(plan, parts, phase)
        self._hold()
        return found

    def _hold(self) -> None:
        if not self._world.hides_rows:
            self.settle()

    def _share(self, sizes: dict[str, int]) -> SharedMemory:
        return _OwnMemory(sizes, self.who, self._device)

    def _deliver_rows(self, plan: FlexPlan, rows: Tensor, labels: Tensor | None) -> None:
        areas = [self._memory.areas[name].own.data_ptr() for name in ("rows", "labels")]
        parts = [(at, at, part) for at, part in zip(areas, (rows, labels), strict=True) if part is not None]
        finish = self._start(plan, parts, homeward=False)
        to_itself = plan.routes_TC2.masked_fill(plan.routes_TC2[:, :, :1] != 0, -1)
        self._rows.deliver_rows(
            rows, labels, to_itself, plan.places, self._peers("rows"), self._peers("labels"), self.who,
            4 * self._blocks,
        )  # fmt: skip
        finish()

    def _return_rows(
        self, plan: FlexPlan, rows: Tensor | None, weights: Tensor | None, num_kept: int
    ) -> None:
        named = zip(("returned", "weights"), (rows, weights), strict=True)
        given = [(name, part.contiguous()) for name, part in named if part is not None]
        parts = [(self._memory.areas[name].own.data_ptr(), part.data_ptr(), part) for name, part in given]
        self._start(plan, parts, homeward=True)()

    def _push_clones(self, clones: ClonePlan, weights: Sequence[Tensor], ranges: Sequence[int]) -> None:
        self._move_clones(clones, sum(each[0].nbytes for each in weights))

    def _add_clones(self, clones: ClonePlan, totals: Sequence[Tensor | None], ranges: Sequence[int]) -> None:
        self._move_clones(clones, sum(4 * each[0].numel() for each in totals if each is not None))
        super()._add_clones(clones, totals, ranges)  # of what this rank has for others, as fast as it can

    def _move_clones(self, clones: ClonePlan, num_bytes: int) -> None:
        fabric = self._world.fabric
        self._timed.clones(
            self._stream, KIND, clones.experts_PS, clones.num_experts, num_bytes=num_bytes,
            num_sms=self._world.num_sms,
            seconds_per_byte=0.0 if fabric.is_free else 1 / fabric.nvlink,
            latency=0.0 if fabric.is_free else fabric.latency,
        )  # fmt: skip

    def _start(
        self, plan: FlexPlan, parts: Sequence[tuple[int, int, Tensor]], *, homeward: bool
    ) -> Callable[[], None]:
        fabric = self._world.fabric
        self._world.records.append(Record(KIND, "rows", self.who.num_sources, Load(), fabric.latency))
        return self._timed.rows(
            self._stream, KIND,
            [RowsPart(out, own, part.shape[1] * part.element_size()) for out, own, part in parts],
            plan.table_SC, plan.places.first_S, homeward=homeward, num_sms=self._world.num_sms,
            seconds_per_byte=0.0 if fabric.is_free else 1 / fabric.nvlink,
            latency=0.0 if fabric.is_free else fabric.latency,
        )  # fmt: skip


def connect(state: FlexState, dispatcher: FlexDispatcher, world: World, tokens: int) -> FabricTransport:
    """Let all layers exchange rows of ``tokens`` tokens a rank over the fabric."""
    transport = FabricTransport(dispatcher.links, torch.device("cuda", torch.cuda.current_device()), world)
    state.transport, state.tokens, state.num_ids = transport, tokens, dispatcher.top_k
    return transport
