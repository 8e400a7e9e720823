"""``experts_mlp_fp8``: the experts' compute on Hopper, all products in fp8, as one differentiable function.

The recipe is ``fp8_blockwise`` (see ``precision/recipes.py``), the result that of ``experts_mlp_quantized``
up to the order of sums::

    forward    map rows -> permute and quantise x -> gate_up (SwiGLU x weight, quantised) -> down -> combine
    backward   permute and quantise dy -> d act -> SwiGLU backward, quantised as rows and as panels
               panels of dy -> d down;   panels of x -> d gate_up;   d x -> combine

As in bf16 (``triton/swiglu_mlp.py``) an id of -1 contributes nothing, x, the pre-activation in bf16 and the
map are kept for backward (and some scales: those of panels follow from forward), weight gradients go straight
to a parameter's sink, and nothing waits for the device.

What is kept may be codes instead (``memory.keep``): of x those that forward made, in the order of its rows,
and of the pre-activation codes from the first product's own registers. Backward decodes the pre-activation
in one pass, and x where it makes its panels. Rows that somebody else keeps anyway stay as they are.

Where the codes of the two weights come from::

    scales         the weights are codes already (``QuantizedWeight``); backward transposes them, unless they
                   are kept so too
    else           made here, and anew in backward, transposed: kept, those of all layers would stay in memory

Sizes: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.kernels.expert_autograd import Given, Grads, compute_experts
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import fp8_launch as gemm
from fsdmoe.kernels.gluon import fp8_swiglu_grad as swiglu
from fsdmoe.kernels.grad_sink import refuse_homeless, sink_of
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import (
    Codes,
    decode_rows,
    empty_codes,
    expert_scales,
    quantize_rows,
    sort_weights,
    sum_parts_,
)
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.kernels.triton.permute_kernels import combine_rows
from fsdmoe.kernels.triton.quantize_kernels import transpose_codes_triton
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.precision.formats import Recipe, blockwise_scale
from fsdmoe.precision.quantized_weight import WeightScales, scales_of

_MAX_EXPERTS = 1024


def supports_fp8(
    recipe: Recipe, x_RD: Tensor, gate_up_E2ND: Tensor, down_EDN: Tensor, activation: str
) -> bool:
    """Whether these tensors can take this path: bf16, a recipe in E4M3, sizes in whole blocks, SwiGLU."""
    num_experts, d, n = down_EDN.shape
    return (
        blockwise_scale(recipe) is not None
        and activation == "swiglu"
        and x_RD.is_cuda
        and x_RD.dtype == torch.bfloat16
        and (_are_plain(gate_up_E2ND, down_EDN) or _are_codes(gate_up_E2ND, down_EDN))
        and d % BLOCK == n % BLOCK == 0
        and num_experts <= _MAX_EXPERTS
        and gate_up_E2ND.is_contiguous()
        and down_EDN.is_contiguous()
    )


def _are_plain(*weights: Tensor) -> bool:
    return all(weight.dtype == torch.bfloat16 for weight in weights)


def _are_codes(*weights: Tensor) -> bool:
    """Quantised by the recipe before they came."""
    blocks = all(
        (found := scales_of(weight)) is not None and found.block == (BLOCK, BLOCK) for weight in weights
    )
    in_fp8 = all(weight.dtype == FP8 for weight in weights)
    return blocks and in_fp8


class KeptPanels(NamedTuple):
    pre: Tensor
    """``[2, M, N]``, or codes ``[2M, N]``."""
    pre_scales: Tensor | None
    """``[N/128, 2M]`` of codes."""
    x_codes_RD: Tensor | None
    x_row_scales: Tensor | None
    x_scales_EB: Tensor
    act_scales_EB: Tensor
    """Of panels: the largest of an expert's row scales."""


class PanelOperands(NamedTuple):
    """Of weight gradients."""

    dy_RD: Tensor
    act: list[Codes]
    """Panels, which are the largest tensors here: given up once they have been used."""
    dpre: Codes
    x_RD: Tensor | Codes
    x_scales_EB: Tensor
    row_map: RowMap


Kept = tuple[KeptPanels, RowMap]


class BlockwiseProducts(NamedTuple):
    """See :class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`."""

    power_of_two: bool
    max_rows: int | None
    gate_up_scales: WeightScales | None
    """Of a weight that is codes already."""
    down_scales: WeightScales | None
    keeps_codes: bool = False
    """Of the pre-activation."""
    keeps_x: bool = True
    """x itself, not its codes."""

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Kept | tuple[()]]:
        x_RD = given.x_RD
        power_of_two = self.power_of_two
        row_map = build_row_map(ids_RK, given.down_EDN.shape[0], align=BLOCK, max_rows=self.max_rows)
        gate_up = self._forward_codes(given.gate_up_E2ND, self.gate_up_scales)
        own = None if self.keeps_x or not keep else empty_codes(len(x_RD), x_RD.shape[1], x_RD.device)
        x = quantize_rows(x_RD, row_map, power_of_two=power_of_two, kept=own)
        kept_as: gemm.KeptAs = "nothing" if not keep else "codes" if self.keeps_codes else "values"
        pre, act = gemm.gate_up(
            x, given.weights_RK, gate_up, row_map, keep=kept_as, power_of_two=power_of_two, dtype=x_RD.dtype,
        )  # fmt: skip
        x_scales = x.scales
        del x
        activated = [act, row_map]
        if pre is None:
            return activated, ()
        pre_codes, pre_scales = (pre, None) if isinstance(pre, Tensor) else pre
        x_codes, x_row_scales = (None, None) if own is None else own
        scales = expert_scales(x_scales, row_map), expert_scales(act.scales, row_map)
        return activated, (KeptPanels(pre_codes, pre_scales, x_codes, x_row_scales, *scales), row_map)

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        act, row_map = activated
        down = self._forward_codes(given.down_EDN, self.down_scales)
        return combine_rows(gemm.project(act, down, row_map, dtype=given.x_RD.dtype), row_map)

    def down_dgrad(
        self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[PanelOperands, tuple[Codes, Codes, RowMap]]:
        panels, row_map = kept
        kept.clear()
        weights_RK = given.weights_RK
        power_of_two = self.power_of_two
        dy_RD = dy_RD.contiguous()
        gate_up = self._transposed(given.gate_up_E2ND, self.gate_up_scales)
        down = self._transposed(given.down_EDN, self.down_scales)
        dy = quantize_rows(dy_RD, row_map, power_of_two=power_of_two)
        dact_MN = gemm.project(dy, down, row_map, dtype=given.x_RD.dtype)
        del dy
        weights_M = sort_weights(weights_RK, row_map)
        found = swiglu.swiglu_grad(
            _pre_activation(panels, dact_MN), dact_MN, weights_M, panels.act_scales_EB, row_map,
            power_of_two=power_of_two,
        )  # fmt: skip
        del dact_MN
        dweights_RK = torch.zeros(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
        sum_parts_(found.weight_parts, row_map, dweights_RK)
        if grads.weights_RK is not None:
            grads.weights_RK.put(dweights_RK)
        x: Tensor | Codes = given.x_RD
        if panels.x_codes_RD is not None and panels.x_row_scales is not None:
            x = Codes(panels.x_codes_RD, panels.x_row_scales)
        operands = PanelOperands(dy_RD, [found.act_panels], found.panels, x, panels.x_scales_EB, row_map)
        return operands, (found.rows, gate_up, row_map)

    def wgrad(self, operands: PanelOperands, grads: Grads) -> None:
        dy_RD, act, dpre, x_RD, x_scales_EB, row_map = operands
        power_of_two = self.power_of_two
        if grads.down_EDN is not None and (places := grads.down_EDN.places()):
            dy = gather_panels(dy_RD, row_map, power_of_two=power_of_two)
            for first, out, accumulate in places:
                gemm.weight_grad(dy, act[0], row_map, out, accumulate=accumulate, first_expert=first)
            del dy
        act.clear()
        if grads.gate_up_E2ND is not None and (places := grads.gate_up_E2ND.places()):
            x = gather_panels(x_RD, row_map, power_of_two=power_of_two, scales_EB=x_scales_EB)
            for first, out, accumulate in places:
                gemm.weight_grad(dpre, x, row_map, out, accumulate=accumulate, first_expert=first)

    def gate_up_dgrad(self, operands: tuple[Codes, Codes, RowMap], given: Given, grads: Grads) -> None:
        dpre, gate_up, row_map = operands
        if grads.x_RD is not None:
            dx_MD = gemm.project(dpre, gate_up, row_map, dtype=given.x_RD.dtype)
            grads.x_RD.put(combine_rows(dx_MD, row_map))

    def _forward_codes(self, weight: Tensor, found: WeightScales | None) -> Codes:
        if found is not None:
            return Codes(weight.detach(), found.scales)
        return quantize_weight(weight, power_of_two=self.power_of_two, transposed=False)[0]

    def _transposed(self, weight: Tensor, found: WeightScales | None) -> Codes:
        """For backward: gate_up ``[E, D, 2N]``, down ``[E, N, D]``."""
        if found is not None:
            transposed = found.transposed
            if transposed is None:
                transposed = transpose_codes_triton(weight.detach())
            return Codes(transposed, found.scales.mT.contiguous())
        return quantize_weight(weight, power_of_two=self.power_of_two, plain=False)[1]


def _pre_activation(kept: KeptPanels, dact_MN: Tensor) -> Tensor:
    """``[2, M, N]``."""
    if kept.pre_scales is None:
        return kept.pre
    return decode_rows(kept.pre, kept.pre_scales, dact_MN.dtype).view(2, *dact_MN.shape)


def fp8_products(
    own: ExpertWeights, weights: Iterable[Tensor], policy: ExpertPolicy, max_rows: int | None
) -> BlockwiseProducts:
    """Of both ``weights``, which may have clones behind a rank's ``own``."""
    for weight in own[:2]:
        if scales_of(weight) is not None and weight.requires_grad and torch.is_grad_enabled():
            refuse_homeless(sink_of(weight))
    assert policy.recipe is not None
    power_of_two = blockwise_scale(policy.recipe) == "power_of_two"
    keeps_x = not (policy.keeps_codes and policy.has_own_rows)
    gate_up, down = map(scales_of, weights)
    return BlockwiseProducts(power_of_two, max_rows, gate_up, down, policy.keeps_codes, keeps_x)


def experts_mlp_fp8(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None = None
) -> Tensor:
    """The experts' output for every row by the policy's recipe; differentiable in x, routing weights and both
    weights.

    ``max_rows`` bounds how many ids are not -1; one that proves too small gives NaN, not a partial sum."""
    products = fp8_products(weights, weights[:2], policy, max_rows)
    rows = Rows(*(each.contiguous() for each in rows))
    return compute_experts(products, rows, ExpertWeights(*weights[:2]), keeps_x=products.keeps_x)
