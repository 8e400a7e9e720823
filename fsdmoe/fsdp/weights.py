"""The weights of one group, in flat buffers.

::

    main    fp32   [slice]           what the optimizer steps on; the user's parameters are pieces of it
    shard   bf16   [slice]           the same in compute precision: the input of the all-gather
    full    bf16   [slice x ranks]   in a slot: the output of the all-gather; modules compute with views

Weights that are sent quantised have fp8 codes for ``shard`` and ``full``, and separate scales
(:mod:`fsdmoe.fsdp.block_scales`). Where one rank holds them whole, ``transposed`` has each
weight's codes transposed, if that was asked for: the two together take what a bf16 ``shard`` would.

Frozen weights that are kept so (``precision.frozen_dtype``) have codes alone, in eight bits or in four
(:mod:`fsdmoe.fsdp.four_bit_codes`). Their ``main`` has memory only
while it is open: from :meth:`WeightBuffer.open` to :meth:`WeightBuffer.close`, which makes the codes of it.

Over a single rank nothing is sent: ``full`` is ``shard``. In pure fp32 ``shard`` is ``main``. With
``fsdp.lean`` there is no ``shard``: gathering casts ``main``. With ``precision.qat`` gathering ends by
rounding ``full`` in place, so products read rounded weights and gradients are those of the main weights.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from fsdmoe.core.compat import all_gather
from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.block_scales import BlockScales
from fsdmoe.fsdp.collectives import Stage, local
from fsdmoe.fsdp.context import GroupContext
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.four_bit_codes import FourBitCodes
from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.fsdp.sharded_tensor import plain_attributes
from fsdmoe.kernels.backend import triton_for
from fsdmoe.precision.deployed_formats import round_weight_
from fsdmoe.precision.quantized_weight import WeightCodes


class _CodesGuard(ReadGuard):
    is_coded = True


_CODED = (
    "it is kept in codes (precision.frozen_dtype), and has values only while its module computes or a "
    "checkpoint is loaded; leave precision.frozen_dtype out to read or change it"
)


class WeightBuffer:
    """Main weights, their copy in compute precision, and which of the two is newer."""

    full: torch.Tensor

    def __init__(self, plan: GroupPlan, params: list[FlatParam], context: GroupContext) -> None:
        self._plan, self._params = plan, params
        self._rank = context.meshes.rank(plan.axis)
        numel, policy = plan.layout.slice_numel, context.policy
        zeros = partial(context.pool.zeros, device=context.shard_device)
        main_dtype = plan.main_dtype(policy)
        self.guard = _CodesGuard() if plan.keeps_codes else ReadGuard()
        """Why the user's parameters cannot be read now, and who steps them on another stream."""
        self.shard: torch.Tensor | None
        if plan.keeps_codes:  # main is not of the pool, which would keep its memory
            self.main = torch.zeros(numel, dtype=policy.param_dtype, device=context.shard_device)
            self.shard = zeros(plan.stored(numel), plan.dtype)
        elif main_dtype == plan.dtype:
            self.main = self.shard = zeros(numel, main_dtype)
        else:
            self.main = zeros(numel, main_dtype)
            is_lean = plan.gathered and policy.fsdp.lean
            self.shard = None if is_lean else zeros(numel, plan.dtype)
        self.scales: BlockScales | None = None
        """Of weights that are sent quantised."""
        self.four_bit: FourBitCodes | None = None
        """Of frozen weights in four bits, which have no ``scales``."""
        self.transposed: torch.Tensor | None = zeros(numel, plan.dtype) if plan.keeps_transposed else None
        """Their codes, each weight's transposed, where one rank holds them whole."""
        self.codes: list[WeightCodes] | None = None
        """Of each parameter, where kernels make them of whole weights."""
        if plan.four_bit is not None:
            factors = zeros(plan.four_bit.factor_numel(numel), torch.bfloat16)
            self.four_bit = FourBitCodes(plan, factors)
        elif plan.scaling is not None:
            assert self.shard is not None
            self._owned = plan.layout.owned(self._rank)
            self.scales = BlockScales(plan.params, self._owned, self.main.device, self.transposed)
            self.codes = self.scales.whole(self.shard)
        self._shard_group = context.meshes.group(plan.axis) if plan.layout.num_ranks > 1 else None
        self._seen_version = self._cast_version = -1
        self._num_changes = 0

    @property
    def cast(self) -> torch.Tensor | None:
        """The copy in compute precision, where there is one apart from ``main`` and casting makes it."""
        return None if self.shard is self.main or self._plan.scaling is not None else self.shard

    def derived(self) -> list[torch.Tensor]:
        """What :meth:`refresh` computes from the main weights."""
        if self._plan.keeps_codes or self.shard is self.main:
            return []
        return [tensor for tensor in (self.shard, self.transposed) if tensor is not None]

    def read_in_steps(self) -> list[torch.Tensor | None]:
        """What gathers and products read, or may."""
        codes = [self.shard, self.transposed, *([] if self.four_bit is None else [self.four_bit.factors])]
        # main has no memory where codes alone are kept
        return codes if self._plan.keeps_codes else [self.main, *codes]

    def version(self) -> int:
        """Grows whenever main weights change, through the flat buffer or through a parameter."""
        version = self.main._version + self._num_changes
        with plain_attributes():
            for param in self._params:
                version += param.sharded._version + param.sharded.access.writes  # type: ignore[attr-defined]
        return version

    def refreshed_version(self) -> int:
        """The version that the compute-precision shard has: another number once it is other weights."""
        return self._seen_version

    @property
    def has_changed(self) -> bool:
        """Main weights were written since the last :meth:`refresh`."""
        return self.version() != self._seen_version

    def mark_changed(self, *, cast: bool = False) -> None:
        """For an optimizer that writes ``main`` itself: call on every rank, also where a rank's part is
        empty. With ``cast`` it writes ``shard`` (and ``transposed``) too, so the next refresh need not."""
        is_current = not self.has_changed
        self._num_changes += 1
        if cast and is_current:
            self._cast_version = self.version()

    def refresh(self) -> bool:
        """Bring the compute-precision shard up to date; whether anything had changed. Collective for weights
        that are sent quantised: all ranks find the same changes, also where their part is empty."""
        version = self.version()
        if version == self._seen_version:
            return False
        self._seen_version = version
        if version == self._cast_version:
            return True
        if self.scales is not None or self.cast is not None:
            self.guard.wait()  # main is read here, ahead of the unit's own turn
        if self.cast is not None:
            self.cast.copy_(self.main)
        if self.scales is not None and not self._plan.keeps_codes:
            self._encode()
        return True

    def open(self) -> None:
        """Have the values of weights that are kept as codes, to be written."""
        codes = self.four_bit or self.scales
        assert codes is not None
        assert self.shard is not None
        storage = self.main.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.main.numel() * self.main.element_size())
        codes.decode(self.shard, self.main)
        self.guard.problem = None

    def close(self, *, encode: bool = True) -> None:
        """Make codes of what was written, and let go of the values. Collective over the shard axis, unless
        not to ``encode``."""
        if encode:
            self._encode()
            self._num_changes += 1
        self.guard.problem = _CODED
        storage = self.main.untyped_storage()
        if storage.resizable():  # host memory that numpy has seen (a checkpoint was read into it) is not
            storage.resize_(0)

    def _encode(self) -> None:
        assert self.shard is not None
        if self.four_bit is not None:
            self.four_bit.encode(self.main, self.shard)
            return
        assert self.scales is not None
        fused = triton_for(self.main)
        if self.codes is not None and fused is not None:
            for held, codes in zip(self._owned, self.codes, strict=True):
                fused.encode_weight_(held.of(self.main).view(codes.plain_EAB.shape), codes)
            return
        largest = self.scales.measure(self.main)
        if self._shard_group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._shard_group)
        self.scales.encode(self.main, self.shard)

    def gather_stages(self) -> list[Stage]:
        """From the shard to ``full``: straight, or by way of this rank's slice of it."""
        if not self._plan.gathered:
            return []
        # On the stream that gathers, which runs ahead of the caller's: its own wait comes with its turn.
        stages: list[Stage] = [local(self.guard.wait)]
        stages += self._sent(self.main if self.shard is None else self.shard, self.full)
        if self.four_bit is not None:
            stages += self._sent(self.four_bit.factors, self.four_bit.full)
        return stages + (self._rounding_stages() if self._plan.is_rounded else [])

    def _sent(self, source: torch.Tensor, full: torch.Tensor) -> list[Stage]:
        stages: list[Stage] = []
        own: torch.Tensor = source
        if source.device != full.device or source.dtype != full.dtype:
            numel = source.numel()
            own = full[self._rank * numel : (self._rank + 1) * numel]
            stages.append(local(partial(own.copy_, source, non_blocking=True)))
        if self._shard_group is not None:
            if full.dtype.itemsize == 1:  # float8, which gloo does not know
                full = full.view(torch.uint8)
                own = own.view(torch.uint8)
            stages.append(partial(all_gather, full, own, self._shard_group))
        elif own is source:
            stages.append(local(partial(full.copy_, source, non_blocking=True)))
        return stages

    def _rounding_stages(self) -> list[Stage]:
        """Of whole weights: a block that is cut over ranks is put together by now."""
        stages = []
        for param, segment in zip(self._plan.params, self._plan.layout.segments, strict=True):
            assert param.rounding is not None
            weight = self.full[segment.start : segment.end].view(param.local_shape)
            stages.append(local(partial(round_weight_, weight, param.rounding)))
        return stages
