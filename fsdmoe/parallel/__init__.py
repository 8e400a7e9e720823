"""Model, meshes and policies become a parallel model. Read ``build.py`` first: ``parallelize`` applies tensor
parallelism, expert parallelism, recipes, recomputation and flat sharding, in this order.
"""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.parallel.build import ParallelPolicy, end_step, must_repeat, parallelize

__getattr__ = lazy_names(__name__, __file__)
