"""Products of the head with its weight in fp8, for the chunked cross-entropy (``precision.head``).

Two of a chunk's three products are quantised as ``fp8_blockwise`` quantises those of a linear layer::

    logits     [C, V] = hidden [C, D] @ weight.T       1 x 128 with 128 x 128
    d hidden   [C, D] = d logits [C, V] @ weight       1 x 128 with 128 x 128

The weight's gradient stays in the precision of the weight: it is added up in float32 over all chunks by the
product itself, which torch's products in fp8 cannot do, and a pass of its own over a gradient of that size
would take what they gain.

The weight is quantised once for all chunks; a vocabulary that is no multiple of 128 is padded.
Sizes: C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.backend import takes_fp8_products
from fsdmoe.kernels.fp8_operands import BLOCK, Operand, Wanted
from fsdmoe.kernels.fp8_quantize import quantize_both
from fsdmoe.kernels.quantized_linear import quantized_matmul
from fsdmoe.kernels.scaled_matmul import scaled_matmul
from fsdmoe.precision.formats import Recipe, Scaling


def fp8_head(recipe: Recipe, emulate: bool, weight_VD: Tensor) -> Fp8Head | EmulatedHead:
    """By torch's products in fp8 where they take the weight, else emulated."""
    weight_VD = weight_VD.detach()
    if takes_fp8_products(weight_VD) and weight_VD.shape[1] % BLOCK == 0:
        return Fp8Head(recipe, weight_VD)
    if not emulate:
        raise ConfigError(
            "precision.head: expected a head that products in fp8 take (bfloat16 on Hopper, CUDA 12.9 or "
            f"later, a width that is a multiple of 128), got {weight_VD.dtype} on {weight_VD.device.type}, a"
            f"  weight {tuple(weight_VD.shape)}; set precision.emulate = true to "
            'compute it in plain torch (slowly), or precision.head = "bf16"'
        )
    return EmulatedHead(recipe, weight_VD)


class Fp8Head:
    """See the module's text."""

    def __init__(self, recipe: Recipe, weight_VD: Tensor) -> None:
        self._recipe = recipe
        self._dtype = weight_VD.dtype
        forward, dgrad = recipe.forward.second, recipe.dgrad.second
        assert forward is not None
        assert dgrad is not None
        self._padding = -len(weight_VD) % BLOCK
        weight_VD = F.pad(weight_VD, (0, 0, 0, self._padding)) if self._padding else weight_VD
        both = quantize_both(weight_VD, Wanted(forward), Wanted(dgrad), pad=False)
        assert both.rows is not None
        assert both.transposed is not None
        self._weight_VD = both.rows
        self._weight_DV = both.transposed

    def logits(self, hidden_CD: Tensor) -> Tensor:
        logits_CV = self._product(hidden_CD, self._recipe.forward.first, self._weight_VD)
        return logits_CV[:, : -self._padding].contiguous() if self._padding else logits_CV

    def hidden_grad(self, grad_logits_CV: Tensor, out_CD: Tensor) -> None:
        if self._padding:
            grad_logits_CV = F.pad(grad_logits_CV, (0, self._padding))
        out_CD.copy_(self._product(grad_logits_CV, self._recipe.dgrad.first, self._weight_DV))

    def _product(self, x_CK: Tensor, scaling: Scaling, weight_NK: Operand) -> Tensor:
        rows = quantize_both(x_CK, Wanted(scaling), None).rows
        assert rows is not None
        return scaled_matmul(rows, weight_NK, self._dtype)[: len(x_CK)]


class EmulatedHead:
    """The same in plain torch."""

    def __init__(self, recipe: Recipe, weight_VD: Tensor) -> None:
        self._recipe = recipe
        self._weight_VD = weight_VD

    def logits(self, hidden_CD: Tensor) -> Tensor:
        return quantized_matmul(hidden_CD, self._weight_VD, self._recipe.forward).to(hidden_CD.dtype)

    def hidden_grad(self, grad_logits_CV: Tensor, out_CD: Tensor) -> None:
        out_CD.copy_(quantized_matmul(grad_logits_CV, self._weight_VD.t(), self._recipe.dgrad))
