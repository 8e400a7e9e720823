"""The moments of a group's parameters, and its *update ranges*, which one call updates.

An update range is a run of neighbouring parameters of one parameter group. Where every parameter has separate
buffers (:mod:`fsdmoe.optim.moments`), it is one parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.memory.pinned import pinned_zeros
from fsdmoe.optim.config import TORCHAO_BLOCKS
from fsdmoe.optim.moments import MomentFormat, MomentPolicy, blocks_placement, check_slices, place_of_moments
from fsdmoe.optim.torchao_moments import TorchaoMoment
from fsdmoe.precision.block_floats import BLOCK, BlockFloats, ElementPlace, Moment, num_blocks
from fsdmoe.precision.quantized_weight import WeightCodes

NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class UpdateRange:
    """A run of one flat shard with one group's settings, and the same run of gradients and moments."""

    main: torch.Tensor
    exp_avg: Moment | TorchaoMoment
    exp_avg_sq: Moment | TorchaoMoment
    step: torch.Tensor
    group: ParamGroup
    indices: list[int]
    """Which of the group's parameters it covers."""
    held: slice
    """Where in the group's flat shard it lies."""
    cast: torch.Tensor | None
    """The same run of the weights in compute precision, where they are kept apart from ``main``."""
    codes: list[tuple[slice, WeightCodes]] | None
    """Where the update writes the codes of each parameter of the run, and which part of it that one is."""
    place: ElementPlace | None
    """Where it lies in its parameter; only with stochastic rounding."""
    stochastic: bool
    """So are main weights, to bfloat16."""
    on_host: bool
    """The moments live in host memory."""

    @property
    def grad(self) -> torch.Tensor:
        grad = self.group.grad
        assert grad is not None
        assert grad.main is not None
        return grad.main[self.held]

    def part(self, part: slice, exp_avg: Moment, exp_avg_sq: Moment) -> UpdateRange:
        """A part of it, whole blocks, whose moments lie elsewhere."""
        start, stop, _ = part.indices(self.main.numel())
        return replace(
            self,
            main=self.main[part],
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            held=slice(self.held.start + start, self.held.start + stop),
            cast=None if self.cast is None else self.cast[part],
            codes=None,
            place=None if self.place is None else self.place.after(start),
            on_host=False,
        )


class HostGuard(ReadGuard):
    """Moments in host memory can be used once what is on its way there has arrived: a use waits. What was
    sent ahead for the next step is forgotten, for they may be written."""

    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        if self.finish is not None:
            self.finish()


class GroupMoments:
    """Both moments and the step counts of one group's parameters."""

    def __init__(
        self,
        group: ParamGroup,
        policy: MomentPolicy,
        on_host: list[bool],
        guard: HostGuard,
        held: list[bool],
    ) -> None:
        """``on_host``: whose moments live in host memory, where ``guard`` knows when they can be read;
        ``held``: whose there are."""
        self.group, self._on_host, self._guard = group, on_host, guard
        self._stochastic = policy.stochastic
        main = group.weights.main
        self.step = torch.zeros(len(group.params), dtype=torch.float32, device=main.device)
        self.flat: list[torch.Tensor] = []
        """Both, laid out as the main weights are; or none, and each parameter has its own."""
        self._own: list[tuple[Moment | TorchaoMoment, Moment | TorchaoMoment]] = []
        self._places: list[ElementPlace | None] = []
        self.by_torchao = policy.first in TORCHAO_BLOCKS
        if policy.is_flat and all(held):
            self.flat = [
                torch.zeros_like(main, dtype=kept) for kept in policy.formats if isinstance(kept, torch.dtype)
            ]
            return
        check_slices(group.plan, policy)
        host = partial(pinned_zeros, device=main.device) if main.is_cuda else torch.zeros
        for index, (plan, param) in enumerate(zip(group.plan.params, group.params, strict=True)):
            owned, formats = group.owned_range(param), policy.of(plan)
            make = host if on_host[index] else partial(torch.zeros, device=main.device)
            numel = owned.numel * held[index]
            if isinstance(formats[0], str) and formats[0] in TORCHAO_BLOCKS:
                signs = (True, False)
                own = [TorchaoMoment.zeros(formats[0], numel, main.device, signed=each) for each in signs]
                self._own.append((own[0], own[1]))
            else:
                self._own.append((_zeros(formats[0], numel, make), _zeros(formats[1], numel, make)))
            self._places.append(place_of_moments(plan, owned, group.context.meshes, policy))

    def runs(self, numbers: list[int | None]) -> list[list[int]]:
        """Neighbouring parameters that are stepped together, of those that this rank holds something of;
        ``numbers``: the parameter group of each, none for those that are not stepped here."""
        runs: list[tuple[int | None, list[int]]] = []
        for index, param in enumerate(self.group.params):
            if self.group.owned_range(param).numel and numbers[index] is not None:
                if not runs or runs[-1][0] != numbers[index] or not self.flat:
                    runs.append((numbers[index], []))
                runs[-1][1].append(index)
        return [indices for _, indices in runs]

    @property
    def writes_codes(self) -> bool:
        """Whether an update makes the codes of quantised weights too: moments are plain."""
        return self.group.weights.codes is not None and bool(self.flat)

    def _codes(self, indices: list[int], start: int) -> list[tuple[slice, WeightCodes]]:
        group, found = self.group, []
        for index in indices:
            owned, codes = group.owned_range(group.params[index]), group.weights.codes
            assert codes is not None
            first = owned.offset - start
            found.append((slice(first, first + owned.numel), codes[index]))
        return found

    def update_range(self, indices: list[int]) -> UpdateRange:
        """The run of neighbouring parameters ``indices``; they have taken the same steps."""
        group = self.group
        first, last = (group.owned_range(group.params[index]) for index in (indices[0], indices[-1]))
        held = slice(first.offset, last.offset + last.numel)
        exp_avg, exp_avg_sq = (self.flat[0][held], self.flat[1][held]) if self.flat else self._own[indices[0]]
        return UpdateRange(
            main=group.weights.main[held],
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            step=self.step[indices[0]],
            group=group,
            indices=indices,
            held=held,
            cast=None if group.weights.cast is None else group.weights.cast[held],
            codes=self._codes(indices, held.start) if self.writes_codes else None,
            place=None if self.flat else self._places[indices[0]],
            stochastic=self._stochastic,
            on_host=self._on_host[indices[0]],
        )

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """The state of one parameter, as sharded tensors over the buffers."""
        group, param = self.group, self.group.params[index]
        state: dict[str, torch.Tensor] = {"step": self.step[index]}
        for number, name in enumerate(NAMES):
            if self.flat:
                state[name] = group.sharded_view(param, self.flat[number])
                continue
            moment, sharded = self._own[index][number], param.sharded
            assert isinstance(sharded, ShardedTensor)
            guard = self._guard if self._on_host[index] else None
            if isinstance(moment, torch.Tensor):
                state[name] = sharded.with_piece(moment, guard)
            elif isinstance(moment, TorchaoMoment):
                per_code = 2 if moment.kept == "torchao_4bit" else 1
                for kind, tensor, block in (
                    ("codes", moment.codes, per_code),
                    ("scales", moment.scales, TORCHAO_BLOCKS[moment.kept]),
                ):
                    state[f"{name}_{moment.kept}_{kind}"] = _of_blocks(sharded, tensor, block)
            else:
                # Other names than plain moments have: a load must not take numbers for codes.
                state[f"{name}_codes"] = sharded.with_piece(moment.codes, guard)
                exponents = _of_blocks(sharded, moment.exponents, BLOCK)
                state[f"{name}_exponents"] = exponents.with_piece(moment.exponents, guard)
        return state

    def nbytes(self, *, on_host: bool = False) -> int:
        """What both moments take on the device, or in host memory."""
        pairs = (pair for pair, away in zip(self._own, self._on_host, strict=False) if away == on_host)
        own = (tensor for pair in pairs for moment in pair for tensor in tensors_of(moment))
        return sum(tensor.nbytes for tensor in (*(() if on_host else self.flat), *own))


def tensors_of(moment: Moment | TorchaoMoment) -> list[torch.Tensor]:
    if isinstance(moment, TorchaoMoment):
        return [moment.codes, moment.scales]
    return [moment.codes, moment.exponents] if isinstance(moment, BlockFloats) else [moment]


def _zeros(kept: MomentFormat, numel: int, make: Callable[..., torch.Tensor]) -> Moment:
    if isinstance(kept, torch.dtype):
        return make(numel, dtype=kept)
    return BlockFloats(make(numel, dtype=torch.uint8), make(num_blocks(numel), dtype=torch.uint8))


def _of_blocks(sharded: ShardedTensor, piece: torch.Tensor, block: int) -> ShardedTensor:
    """``piece``, with one element for each block, cut as the parameter is."""
    start, end = (sharded.start // block, -(-sharded.end // block)) if piece.numel() else (0, 0)
    placement = blocks_placement(sharded.placement, block)
    return ShardedTensor(piece, placement, start, end, sharded.meshes, sharded.shard_axis)
