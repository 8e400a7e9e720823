"""What the experts' compute is given: rows with their choices, weights, low-rank updates of them, and how to
compute.

Plain tuples: they are made anew in every layer of every step.
Sizes: R rows, K assignments a row, E experts here, D hidden, N expert width (its share under ETP), Q rank of
an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fsdmoe.kernels.activations import GPT_OSS_LIMIT
from fsdmoe.kernels.late_grads import LateGrads
from fsdmoe.kernels.products import Products
from fsdmoe.precision.formats import Recipe
from fsdmoe.precision.operand_state import OperandState


class Rows(NamedTuple):
    """Rows with their experts and the weight of each."""

    x_RD: Tensor
    weights_RK: Tensor
    """fp32, differentiable."""
    ids_RK: Tensor
    """Experts; -1 none. Global ids before dispatch, this rank's own afterwards."""

    def split(self, sizes: Sequence[int]) -> list[Rows]:
        """Ranges of so many rows."""
        if len(sizes) == 1:
            return [self]
        # Sizes and not a number of pieces: backward joins the gradients of all of them in one node.
        return [Rows(*pieces) for pieces in zip(*(each.split(list(sizes)) for each in self), strict=True)]


class ExpertWeights(NamedTuple):
    """The parameters of this rank's experts."""

    gate_up_E2ND: Tensor
    """``[E, 2N, D]``: all gates before all ups. ``[E, N, D]`` of experts without gates."""
    down_EDN: Tensor
    gate_up_bias: Tensor | None = None
    """``[E, 2N]``."""
    down_bias: Tensor | None = None
    """``[E, D]``."""


class LowRankUpdates(NamedTuple):
    """Terms added to weights (LoRA), as their factors: an expert computes with ``W + B A``, and the product
    is never made. None for both factors of a weight that has no such term."""

    gate_up_a: Tensor | None = None
    """``[E, Q, D]``."""
    gate_up_b: Tensor | None = None
    """``[E, 2N, Q]``, in the order of the weight."""
    down_a: Tensor | None = None
    """``[E, Q, N]``."""
    down_b: Tensor | None = None
    """``[E, D, Q]``."""


class ExpertPolicy(NamedTuple):
    """How experts compute."""

    activation: str = "swiglu"
    """A name in ``fsdmoe.kernels.activations``."""
    weight_after: bool = False
    """Multiply by the routing weight after the second projection instead of before it."""
    recipe: Recipe | None = None
    """How products are quantised; None computes in the precision of the weights."""
    emulate: bool = True
    """With a recipe: compute it in plain torch where no kernel takes these experts, instead of refusing."""
    sequential: bool = False
    """One expert after the other, in plain torch."""
    states: tuple[OperandState | None, OperandState | None] = (None, None)
    """With a recipe: statistics of either projection's operands, where they are wanted."""
    recompute: bool = False
    """Backward computes the first product again; the pre-activation is not kept."""
    coded: bool = False
    """Weights are frozen and kept as codes (``precision.frozen_dtype``): values are made for each call."""
    spare_sms: int = 0
    """Multiprocessors that products leave to concurrent transfers."""
    limit: float = GPT_OSS_LIMIT
    """Of activations that clamp."""
    late: LateGrads | None = None
    """Where backward leaves the computation of weight gradients; None computes them at once. Only where both
    projections get one, and where a kernel or plain torch computes in the precision of the weights."""

    products: Products | None = None
    """With a recipe: another library's, chosen by ``precision.backend``."""
    keeps_codes: bool = False
    """With ``fp8_blockwise`` and its kernels: codes for backward, instead of values."""
    keeps_rows: bool = False
    """In the precision of the weights: sorted rows and activations for backward, instead of making them
    again."""
    has_own_rows: bool = False
    """Rows are no tensor that somebody else keeps for backward anyway: they came from other ranks."""

    @property
    def may_be_late(self) -> bool:
        """Whether experts computed so know ``late``."""
        return self.recipe is None and not self.sequential


DEFAULT_POLICY = ExpertPolicy()
NO_UPDATES = LowRankUpdates()
