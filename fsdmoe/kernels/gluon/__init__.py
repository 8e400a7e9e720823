"""Kernels in Gluon for Hopper GPUs: matrix products in fp8, which plain Triton promotes too slowly.

Apart from the other kernels because Gluon's interface is experimental (``compat.py``). Needs Triton 3.6 or
later with its ``experimental`` package: import this package only once chosen.
"""
# ruff: noqa: F401  what ``fp8_for`` hands out

from fsdmoe.kernels.gluon.fp8_low_rank import experts_mlp_fp8_low_rank, supports_fp8_updates
from fsdmoe.kernels.gluon.fp8_mlp import experts_mlp_fp8, fp8_products, supports_fp8
