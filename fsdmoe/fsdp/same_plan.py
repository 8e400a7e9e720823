"""Checks that all ranks planned the same buffers, before any is built.

A parameter that has another place, shape or format on one rank would be mixed up with its neighbours in every
gather."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

from fsdmoe.all_ranks import from_all_ranks
from fsdmoe.errors import ConfigError
from fsdmoe.fsdp.plan import ModelPlan


def require_same_plan(plan: ModelPlan) -> None:
    """Compare the plans of all ranks. Collective.

    Raises:
        ConfigError: On all ranks; names the first parameter that differs, and how.
    """
    rows = _rows(plan)
    digests = from_all_ranks(hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    plans = from_all_ranks(rows)
    pairs = zip_longest(plans[0], plans[other], fillvalue="nothing")
    wanted, found = next(pair for pair in pairs if pair[0] != pair[1])
    raise ConfigError(
        f"parallelize: expected the same model on all ranks, got {wanted} on rank 0 and {found} on rank "
        f"{other}; build it alike on all of them, from the same files and with the same arguments"
    )


def _rows(plan: ModelPlan) -> list[str]:
    """Every parameter in the order of its gathers, with all that decides what is sent."""
    return [
        f"{param.name} {list(param.placement.global_shape)} in {str(param.dtype).removeprefix('torch.')}, "
        f"{'trained' if param.requires_grad else 'frozen'}, over {group.axis} with {unit.name or 'the root'}"
        + (", quantised" if param.scaling is not None else "")
        for unit in plan.units
        for group in unit.groups
        for param in group.params
    ]
