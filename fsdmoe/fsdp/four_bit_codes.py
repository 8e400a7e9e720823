"""Frozen weights in four bits, in flat buffers: codes, two in a byte, and the factors of their blocks.

::

    main      bf16    [slice]                while the group is open
    shard     uint8   [slice / 2]            codes; gathered into ``full``
    factors   bf16    [slice / block * k]    k numbers a block; gathered into ``full_factors``

A block never lies on two ranks, because slices and granules are whole blocks. So a rank makes its codes
alone, and they are the same bits under every number of ranks.
"""

from __future__ import annotations

import torch

from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.precision import four_bit
from fsdmoe.precision.quantized_weight import WeightScales


class FourBitCodes:
    """The factors of one group's blocks, and how codes are made of main weights."""

    def __init__(self, plan: GroupPlan, factors: torch.Tensor) -> None:
        assert plan.four_bit is not None
        self._plan = plan
        self._form = plan.four_bit
        self.factors = factors
        """This rank's."""
        self.full = factors
        """Of all ranks, once gathered."""
        self._table = self._form.table_on(factors.device)

    def scales(self) -> list[WeightScales]:
        """Of each parameter: views of ``full``, for life."""
        found = []
        for param, segment in zip(self._plan.params, self._plan.layout.segments, strict=True):
            *rows, columns = param.local_shape
            start, end = map(self._form.factor_numel, (segment.start, segment.end))
            own = self.full[start:end].view(*rows, columns // self._form.block, self._form.num_factors)
            block = (1, self._form.block)
            found.append(WeightScales(own, block, four_bit=self._form, table=self._table))
        return found

    def encode(self, main: torch.Tensor, codes: torch.Tensor) -> None:
        """Codes and factors of this rank's main weights."""
        four_bit.encode(main, self._form, codes, self.factors)

    def decode(self, codes: torch.Tensor, main: torch.Tensor) -> None:
        """The values of this rank's codes."""
        four_bit.decode(codes, self.factors, self._form, main)
