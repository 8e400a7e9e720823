"""Which parts of a model have products of a recipe on this device, and whose; without any it is refused."""

from __future__ import annotations

import json
from typing import Literal

import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.architecture import Architecture, current_architecture
from fsdmoe.kernels.backend import has_fp8_kernels, has_fp8_products
from fsdmoe.kernels.fp8_operands import takes_products
from fsdmoe.kernels.libraries import LIBRARIES, LibraryKey
from fsdmoe.kernels.products import Products
from fsdmoe.precision.config import OWN_KEYS, Part, PrecisionConfig
from fsdmoe.precision.formats import blockwise_scale


def check_recipe(precision: PrecisionConfig) -> None:
    """Refuse a recipe that nothing here can compute."""
    if precision.recipe == "bf16":
        return
    backend = chosen_backend(precision)
    fused = fused_parts(precision)
    if backend != "own":
        LIBRARIES[backend].require()
        on = current_architecture()
        fused |= LIBRARIES[backend].parts(precision.recipe, on, emulate=precision.emulate)
    is_possible = precision.emulate and backend == "own"
    if not is_possible and not set(precision.covers) <= fused:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
        parts = [part for part in precision.covers if part not in fused]
        others = [part for part in precision.covers if part in fused]
        has_none = "there are no kernels" if backend == "own" else f"{LIBRARIES[backend].name} has no kernels"
        emulated = "" if backend != "te" else 'precision.backend = "own" with '
        raise ConfigError(
            f"precision.recipe: {has_none} of {precision.recipe} for {where}, got precision.covers "
            f"with {', '.join(parts)}; set {emulated}precision.emulate = true to compute what it rounds in "
            'plain torch (slowly), or precision.recipe = "bf16"'
            + (f"; or precision.covers = {json.dumps(others)}, which have kernels" if others else "")
            + _other_backend(precision, backend)
        )


def chosen_backend(precision: PrecisionConfig) -> Literal["own"] | LibraryKey:
    """Whose products the recipe takes here."""
    return backend_on(precision, current_architecture())


def backend_on(precision: PrecisionConfig, on: Architecture | None) -> Literal["own"] | LibraryKey:
    """Whose products the recipe takes on such a GPU. ``auto`` takes torchao's on Blackwell, where fsdmoe has
    none."""
    if precision.backend != "auto":
        return precision.backend
    takes_torchao = (
        on == "blackwell"
        and precision.param_dtype == "bfloat16"
        and set(precision.covers) <= LIBRARIES["torchao"].parts(precision.recipe, on)
        and not any(getattr(precision, key) for key in OWN_KEYS)
    )
    return "torchao" if takes_torchao else "own"


def library_products(precision: PrecisionConfig) -> Products | None:
    """Another library's products, where the recipe takes them here."""
    backend = chosen_backend(precision)
    return None if backend == "own" else LIBRARIES[backend].products(precision.recipe, current_architecture())


def _other_backend(precision: PrecisionConfig, backend: str) -> str:
    """Which backends could compute what this one does not."""
    on = current_architecture()
    return "".join(
        f'; or precision.backend = "{key}", which has some ({library.install})'
        for key, library in LIBRARIES.items()
        if key != backend and set(precision.covers) <= library.parts(precision.recipe, on)
    )


def fused_parts(precision: PrecisionConfig) -> set[Part]:
    """What is computed by kernels here; shapes are checked where they are known."""
    backend = chosen_backend(precision)
    if backend != "own":
        return set(LIBRARIES[backend].parts(precision.recipe, current_architecture()))
    return parts_with_kernels(precision, products=has_fp8_products(), experts=has_fp8_kernels())


def parts_with_kernels(precision: PrecisionConfig, *, products: bool, experts: bool) -> set[Part]:
    """What kernels compute of the recipe on a device that has products in fp8, and fp8 experts."""
    recipe = precision.build_recipe()
    if recipe is None:
        return set()
    found: set[Part] = {"attention", "dense", "shared"} if products and takes_products(recipe) else set()
    return found | ({"experts"} if experts and blockwise_scale(recipe) is not None else set())
