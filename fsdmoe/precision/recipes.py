"""The recipes by name: which formats the operands of each product have.

==============  ==============================================================================================
bf16            nothing is quantised
fp8_blockwise   rows 1 x 128, weights 128 x 128 (DeepSeek-V3). In weight gradients: dy 128 tokens x 1 channel;
                x one scale for all tokens (of an expert) x 128 channels, so that it leaves the inner loop
fp8_fast        computed by fp8_blockwise: its own kernels did not make a step faster, and were removed
fp8_rowwise     one scale a row of either operand
fp8_tensorwise  one scale an operand; in experts, an expert's
mxfp8           1 x 32, scales are powers of two; a weight is quantised along either dim by itself
nvfp4           E2M1 in 1 x 16 with E4M3 scales under one float32; weights 16 x 16; gradients are rounded by
                chance, and both operands of weight gradients rotated first
==============  ==============================================================================================
"""

from __future__ import annotations

from typing import Literal, get_args

from fsdmoe.precision.formats import E2M1, E4M3, E5M2, FP8_BLOCKWISE, Element, Product, Recipe, Scaling

RecipeName = Literal["bf16", "fp8_blockwise", "fp8_fast", "fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4"]
RECIPES = get_args(RecipeName)
REPLACED = {
    "fp8_fast": "fp8_fast is computed by fp8_blockwise: its own kernels with delayed scales did not make a "
    'step faster and were removed (docs/results/removed.md); write "fp8_blockwise"'
}
"""Names that are kept for configurations of earlier versions, and what to tell those who use them."""


def _alike(name: str, x: Scaling, dy: Scaling) -> Recipe:
    """Weights as activations, and every product the same."""
    return Recipe(name, forward=Product(x, x), dgrad=Product(dy, x), wgrad=Product(dy, x))


def _nvfp4() -> Recipe:
    def scaling(block: tuple[int, int], *, stochastic: bool = False, hadamard: int = 0) -> Scaling:
        return Scaling(E2M1, block, "two_level", stochastic, hadamard=hadamard)

    row, weight = scaling((1, 16)), scaling((16, 16))
    return Recipe(
        "nvfp4",
        forward=Product(row, weight),
        dgrad=Product(scaling((1, 16), stochastic=True), weight),
        wgrad=Product(scaling((1, 16), stochastic=True, hadamard=16), scaling((1, 16), hadamard=16)),
    )


def build_recipe(
    name: RecipeName, *, gradients: Element | None = None, power_of_two_scales: bool = False
) -> Recipe | None:
    """The recipe of a name; None for ``bf16``. ``gradients``: their format, where it is not the recipe's."""
    match name:
        case "bf16":
            return None
        case "fp8_blockwise" | "fp8_fast":
            recipe = FP8_BLOCKWISE
        case "fp8_rowwise":
            recipe = _alike(name, Scaling(E4M3, (1, None)), Scaling(E4M3, (1, None)))
        case "fp8_tensorwise":
            recipe = _alike(name, Scaling(E4M3, (None, None)), Scaling(E5M2, (None, None)))
        case "mxfp8":
            row = Scaling(E4M3, (1, 32), "power_of_two")
            recipe = _alike(name, row, row)
        case "nvfp4":
            recipe = _nvfp4()
    recipe = recipe.with_power_of_two_scales() if power_of_two_scales else recipe
    return recipe if gradients is None else recipe.with_gradients_in(gradients)
