"""Which parts of a low-precision recipe a GPU computes by kernels, and which it would emulate.

Emulated products are those of bf16, or of float32, with passes that round their operands. How much slower
that is was measured for no model of a size that is planned, so an emulated part has no price: plans say so
in place of a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import get_args

from fsdmoe.kernels.architecture import Architecture
from fsdmoe.kernels.libraries import LIBRARIES
from fsdmoe.kernels.recipe_support import backend_on, parts_with_kernels
from fsdmoe.plan.hardware import Gpu
from fsdmoe.precision.config import Part, PrecisionConfig


@lru_cache(maxsize=64)  # a search asks for every setting
def faster_parts(precision: PrecisionConfig, gpu: Gpu) -> frozenset[str]:
    """The parts whose products are computed in the format of the recipe."""
    if precision.recipe == "bf16":
        return frozenset()
    on = _architecture(gpu)
    backend = backend_on(precision, on)
    if backend == "own":
        has = gpu.has_fp8_kernels
        found = frozenset(parts_with_kernels(precision, products=has, experts=has))
    else:
        found = LIBRARIES[backend].parts(precision.recipe, on)
    return frozenset(precision.covers) & found


def with_backend(precision: PrecisionConfig, gpu: Gpu) -> PrecisionConfig:
    """With the products that ``backend = "auto"`` takes on this GPU."""
    if precision.recipe == "bf16":
        return precision
    return replace(precision, backend=backend_on(precision, _architecture(gpu)))


def _architecture(gpu: Gpu) -> Architecture | None:
    return "hopper" if gpu.has_fp8_kernels else "blackwell" if gpu.never_ran else None


def why_no_price(precision: PrecisionConfig, gpu: Gpu) -> str:
    """Which parts would be emulated, in a line; empty where all of it has a price."""
    emulated = [
        part
        for part in get_args(Part)
        if part in precision.covers and part not in faster_parts(precision, gpu)
    ]
    if precision.recipe == "bf16" or not emulated:
        return ""
    parts = ", ".join(emulated)
    if not precision.emulate:
        return (
            f"precision.recipe: {gpu.name} has no kernels of {precision.recipe} for {parts}: a run is "
            "refused there and has no price"
        )
    return (
        f"precision.emulate: {precision.recipe} of {parts} is emulated on {gpu.name}, which is slower than "
        "bf16 and has no price"
    )
