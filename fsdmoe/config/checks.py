"""What no section can see alone.

What two features do not do together is in one table (:mod:`fsdmoe.config.compatibility`). Each other rule is
written once, where its part is, and raises the ``ConfigError`` that whoever builds the part by hand would
meet. Here all of them are asked before anything is built. A finding comes with the keys that it follows from,
so that nothing is concluded from a key that is wrong itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from fsdmoe.config.compatibility import check_compatibility, own_where_needed
from fsdmoe.config.hf import check_attention
from fsdmoe.config.schema import Config
from fsdmoe.context_parallel.config import check_context_parallel
from fsdmoe.context_parallel.planner import group_sizes
from fsdmoe.core.axes import Degrees, MeshConfig, axis_sizes, resolve_degrees
from fsdmoe.core.errors import ConfigError
from fsdmoe.data.config import check_batch, require_holdout
from fsdmoe.experts.divide import check_clones_stay, check_expert_width, experts_per_rank
from fsdmoe.models.memory_parts import check_parts
from fsdmoe.tensor_parallel.divide import check_tensor_parallel

Findings = list[tuple[tuple[str, ...], str]]
"""A line, and the keys that it follows from."""

_DENSE_AXES = ("mesh.dp_outer", "mesh.dp_shard", "mesh.cp", "mesh.tp")


def cross_problems(config: Config, world_size: int, *, is_here: bool = True) -> Findings:
    """Each finding with the keys that it follows from. ``is_here``: it is to run on this machine, whose
    devices are asked for kernels."""
    problems = mesh_problems(config, world_size)
    problems += [((row.feature.key, row.other.key), line) for row, line in check_compatibility(config)]
    return problems + _policy_problems(config, is_here)


def mesh_problems(config: Config, world_size: int) -> Findings:
    """What keeps so many ranks from being divided by the mesh of this configuration."""
    problems = _divided_ranks(config, world_size) + _attention_problems(config, world_size)
    if config.experts.flex.domain:  # else a domain is a node, which the run knows
        problems += clone_problems(config, world_size, config.experts.flex.domain)
    if config.model.hf is not None:
        contexts = ("context_parallel.dynamic", "context_parallel.varlen")
        problems += asked(check_attention, config, keys=("mesh.cp", "mesh.tp", *contexts, "data.seq_len"))
    return problems


def clone_problems(
    config: Config, world_size: int, domain: int, *, key: str = "experts.flex.domain"
) -> Findings:
    """What keeps experts from being cloned within NVLink domains of so many ranks, as ``key`` says."""
    degrees = _degrees(config.mesh, world_size)
    if config.experts.dispatcher != "flex" or not config.experts.clones or degrees is None:
        return []
    keys = ("experts.dispatcher", "experts.flex.domain", "mesh.ep")
    return asked(check_clones_stay, degrees.ep, domain, world_size, key=key, keys=keys)


def asked(rule: Callable[..., object], *args: Any, keys: tuple[str, ...] = (), **kwargs: Any) -> Findings:
    """What ``rule`` refuses. ``keys``: what it follows from, in addition to the key that a line begins
    with."""
    try:
        rule(*args, **kwargs)
    except ConfigError as error:
        return [((line.partition(":")[0], *keys), line) for line in error.problems]
    return []


def _divided_ranks(config: Config, world_size: int) -> Findings:
    """What the ranks cannot be divided into, and what cannot be divided over them."""
    model, mesh, train = config.model, config.mesh, config.train
    axes = tuple(f"mesh.{axis}" for axis in mesh.axes)
    experts, width = ("model.num_experts", "model.preset"), ("model.moe_intermediate_size", "model.preset")
    problems = asked(experts_per_rank, model.num_experts, mesh.ep, world_size, keys=experts)
    # Which ranks an ep asks for that no number of ranks can have would lead nowhere.
    tried = dataclasses.replace(mesh, ep=1) if problems else mesh
    problems += asked(resolve_degrees, tried, world_size, keys=axes)
    problems += asked(check_expert_width, model.moe_intermediate_size, mesh.etp, keys=width)
    degrees = _degrees(dataclasses.replace(mesh, ep=1, etp=1), world_size)  # rows are of the dense mesh alone
    if degrees is not None:
        batch, readers = train.global_batch_size, axis_sizes(degrees)[config.context_parallel.data_axis]
        keys = (*_DENSE_AXES, "train.global_batch_size", "train.micro_batch_size")
        problems += asked(check_batch, batch, train.micro_batch_size, dp_size=readers, keys=keys)
    return problems


def _attention_problems(config: Config, world_size: int) -> Findings:
    """What tensor and context parallelism cannot divide."""
    model, tp = config.model, config.mesh.tp
    heads = (model.num_attention_heads, *(() if model.is_mla else (model.num_key_value_heads,)))
    widths = (model.intermediate_size,) if model.first_k_dense_replace else ()
    found = asked(
        check_tensor_parallel, tp, heads=heads, vocab_size=model.vocab_size, widths=widths,
        num_ranks=world_size,
        keys=("mesh.tp", "model.preset", "model.num_attention_heads", "model.vocab_size"),
    )  # fmt: skip
    return found + asked(
        check_context_parallel,
        config.context_parallel,
        sizes=_context_sizes(config, world_size),
        seq_len=config.data.seq_len,
        num_heads=model.num_attention_heads,
        num_kv_heads=heads[-1],
        tp=1 if found else tp,  # so that what cp cannot divide is reported too
        keys=(
            "mesh.cp",
            "data.seq_len",
            "context_parallel.mode",
            "context_parallel.max_tokens",
            "model.preset",
        ),
    )


def _context_sizes(config: Config, world_size: int) -> tuple[int, ...]:
    """Every number of ranks that may share a sequence."""
    degrees = _degrees(config.mesh, world_size) if config.context_parallel.dynamic else None
    return (config.mesh.cp,) if degrees is None else group_sizes(degrees.dp_shard * degrees.cp)


def _degrees(mesh: MeshConfig, world_size: int) -> Degrees | None:
    """None where the ranks cannot be divided so, which is reported as such."""
    with contextlib.suppress(ConfigError):
        return resolve_degrees(mesh, world_size)
    return None


def _policy_problems(config: Config, is_here: bool) -> Findings:
    """What parts that are built from several sections would refuse."""
    problems: Findings = []
    if config.precision.recipe != "bf16" and is_here:
        from fsdmoe.kernels.recipe_support import check_recipe  # asks the device, which needs torch

        problems += asked(check_recipe, own_where_needed(vars(config)))
    if config.train.eval_interval >= 0:
        problems += asked(require_holdout, config.data.holdout, keys=("train.eval_interval",))
    if config.model.hf is None:
        problems += asked(check_parts, config.memory, config.model, keys=("model.preset",))
    return problems
