"""Scaled number formats and the recipes made of them: plain data, that kernels and configuration share.

A matrix product contracts two *operands*, each seen as ``[rows, contraction]``. An operand is quantised in
blocks of ``rows x contraction`` elements that share a scale. A linear layer ``y = x W^T`` has three products,
so a recipe has six operands::

    product   first operand     second operand     contracted over
    forward   x   [T, K]        W   [N, K]         the layer's inputs K
    dgrad     dy  [T, N]        W^T [K, N]         the layer's outputs N
    wgrad     dy^T [N, T]       x^T [K, T]         tokens T (of one expert)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Element:
    """A small floating-point format with a sign, without infinities."""

    name: str
    largest: float
    mantissa_bits: int
    smallest_exponent: int
    """Of normal numbers; below it steps no longer shrink."""
    dtype_name: str | None = None
    """Of torch's dtype, where it has one."""

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """torch's, where it has one."""
        import torch  # not above: configurations, which name formats, are checked before it is loaded

        return None if self.dtype_name is None else getattr(torch, self.dtype_name)


E4M3 = Element("e4m3", 448.0, 3, -6, "float8_e4m3fn")
E5M2 = Element("e5m2", 57344.0, 2, -14, "float8_e5m2")
E2M1 = Element("e2m1", 6.0, 1, 0)
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}

ScaleKind = Literal["float32", "power_of_two", "two_level"]
"""``power_of_two``: rounded up, so that nothing clips (E8M0 holds it). ``two_level``: E4M3 for each block, on
top of one float32 for the whole operand (NVFP4)."""


DeployedFormat = Literal["int4", "mxfp4", "nvfp4", "fp8"]
"""What servers store weights in; see :mod:`fsdmoe.precision.deployed_formats`."""


@dataclass(frozen=True)
class Scaling:
    """How one operand is quantised."""

    element: Element
    block: tuple[int | None, int | None]
    """Rows and contracted elements that share a scale; None: all of them."""
    scale: ScaleKind = "float32"
    stochastic: bool = False
    """Stochastic rounding, up or down in proportion: right on average, for gradients in very few bits."""
    hadamard: int = 0
    """Rotate so many contracted elements at a time, both operands alike, which spreads outliers and leaves
    the product as it is. 0: not at all."""


@dataclass(frozen=True)
class Product:
    """The two operands of a matrix product."""

    first: Scaling
    second: Scaling | None
    """None: it is taken as it is given."""


@dataclass(frozen=True)
class Recipe:
    """How the products of covered layers are quantised."""

    name: str
    forward: Product
    dgrad: Product
    wgrad: Product

    @property
    def gather_scaling(self) -> Scaling | None:
        """How weights are quantised for both products at once; None where each product needs codes of its
        own, along its own contraction."""
        scaling = self.forward.second
        if scaling is None or scaling != self.dgrad.second or scaling.element.dtype_name is None:
            return None
        return scaling if scaling.block[0] == scaling.block[1] else None

    def with_weights_as_given(self) -> Recipe:
        """The same for weights that are quantised already."""
        return replace(
            self, forward=replace(self.forward, second=None), dgrad=replace(self.dgrad, second=None)
        )

    def with_gradients_in(self, element: Element) -> Recipe:
        """The same with gradients (``dy``) in another format."""
        return replace(
            self,
            dgrad=replace(self.dgrad, first=replace(self.dgrad.first, element=element)),
            wgrad=replace(self.wgrad, first=replace(self.wgrad.first, element=element)),
        )

    def with_power_of_two_scales(self) -> Recipe:
        """The same with scales that only move the exponent."""

        def changed(product: Product) -> Product:
            second = product.second and replace(product.second, scale="power_of_two")
            return Product(replace(product.first, scale="power_of_two"), second)

        return replace(
            self, forward=changed(self.forward), dgrad=changed(self.dgrad), wgrad=changed(self.wgrad)
        )


FP8_BLOCKWISE = Recipe(
    "fp8_blockwise",
    forward=Product(Scaling(E4M3, (1, 128)), Scaling(E4M3, (128, 128))),
    dgrad=Product(Scaling(E4M3, (1, 128)), Scaling(E4M3, (128, 128))),
    wgrad=Product(Scaling(E4M3, (1, 128)), Scaling(E4M3, (128, None))),
)
"""DeepSeek-V3's, with one scale for all tokens of the second operand of weight gradients."""

_BLOCKWISE: dict[Recipe, ScaleKind] = {
    FP8_BLOCKWISE: "float32",
    FP8_BLOCKWISE.with_power_of_two_scales(): "power_of_two",
}


def blockwise_scale(recipe: Recipe) -> ScaleKind | None:
    """The kind of scale of ``FP8_BLOCKWISE``, which has kernels for experts; None of any other recipe, and of
    one with gradients in another format."""
    return _BLOCKWISE.get(recipe)
