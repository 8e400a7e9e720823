"""``train.py --dry-run [--world N]``: what a configuration costs on each rank, before anything is built.

Weights, gradients, moments and slots come from the planner that a real run uses; activations, workspaces,
traffic and time from the estimate that ``python -m fsdmoe.plan`` searches with. Nothing is allocated, no
process group is started: a laptop can plan for 1,024 ranks. Behind the plan stands what a run would be
refused for on this host, its files included (:mod:`fsdmoe.config.disk`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fsdmoe.config import Config
from fsdmoe.errors import ConfigError
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.failures import own_rank
from fsdmoe.frozen_layers import keep_frozen_in_fp8
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import MemoryPlan, PlannedMeshes, plan_memory
from fsdmoe.fsdp.units import select_units
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.memory_parts import prepare_parts
from fsdmoe.huggingface.planned import split_wrapped
from fsdmoe.mesh import resolve_degrees
from fsdmoe.models import build_model
from fsdmoe.observe import print_table
from fsdmoe.optim import moment_policy
from fsdmoe.optim.moments import moment_bytes
from fsdmoe.parallel import decoder_layers
from fsdmoe.plan.estimate import Estimate, estimate, shortage
from fsdmoe.plan.hardware import GIB, GPUS
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import MemoryEstimate, activation_bytes, estimate_memory, state_bytes
from fsdmoe.plan.text import memory_rows, traffic_rows
from fsdmoe.plan.traffic import estimate_traffic
from fsdmoe.quantized_layers import apply_recipe
from fsdmoe.tensor_parallel.split import split_tensors

SHOWN_GPUS = ("h100", "h200", "gb200")


def dry_run(config: Config, world_size: int, problems: Sequence[str] = ()) -> int:
    """Print the plan for ``world_size`` ranks, and behind it the ``problems`` that files have and that the
    model has by itself; returns the exit code, which is 2 where there are any."""
    if own_rank() != 0:
        return 2 if problems else 0
    refused = list(problems)
    try:
        _print_plan(config, world_size)
    except ConfigError as error:
        refused += error.problems
    if not refused:
        return 0
    count = f"{len(refused)} problem" + ("s" if len(refused) > 1 else "")
    lines = [f"fsdmoe: {count}, for which a run would be refused:", *(f"  {line}" for line in refused)]
    if problems:
        lines.append("  (--files-elsewhere plans a run whose files are on another machine)")
    print("\n".join(lines), file=sys.stderr)
    return 2


def _print_plan(config: Config, world_size: int) -> None:
    degrees = resolve_degrees(config.mesh, world_size)
    job, setting = Job.of(config), Setting.of(config, world_size)
    is_planned = config.model.hf is None or config.adapter.is_on
    plan = plan_run(config, world_size)[0] if is_planned else None
    if plan is None:
        _check_folder_model(config, PlannedMeshes(degrees))
    states = states_of(plan) if plan is not None and config.adapter.is_on else None
    memory = estimate_memory(job, setting, states)
    found = {name: estimate(job, setting, GPUS[name], memory) for name in SHOWN_GPUS}
    print_table(
        f"{world_size} rank" + ("s" if world_size > 1 else ""),
        ("axis", "size"),
        [(axis, str(size)) for axis, size in vars(degrees).items()],
    )
    any_gpu = found[SHOWN_GPUS[0]]
    rows = memory_rows(any_gpu.memory)
    if plan is not None:
        rows = [*plan.table()[:6], *(row for row in rows if row[0] not in dict(plan.table()))]
    rows.append(("host memory (offload, copy for saves)", f"{host_bytes(config, any_gpu) / GIB:.3f} GiB"))
    rows += traffic_rows(any_gpu.traffic)
    rows.append(("micro-batches per step", str(setting.num_micro_batches(job))))
    rows += [(f"on {name}, {GPUS[name].memory / GIB:.0f} GiB", _verdict(e)) for name, e in found.items()]
    print_table(f"Per rank, {job.num_parameters / 1e9:.3f} B parameters in all", ("what", "how much"), rows)


def _check_folder_model(config: Config, at: PlannedMeshes) -> None:
    """Refuse what a folder's model cannot be asked for, which is known once it is built: a split, units that
    it has not, a recipe that covers nothing, parts that no layer has."""
    model = _split_folder_model(config, at)
    apply_recipe(model, config.precision)
    select_units(model, FSDPPolicy(fsdp=config.fsdp, precision=config.precision))


def states_of(plan: MemoryPlan) -> MemoryEstimate:
    """For adapters, whose base model has weights alone: the estimate by itself takes all to be trained."""
    return MemoryEstimate(
        weights=plan.weights,
        main_weights=plan.main_weights,
        gradients=plan.gradients,
        moments=plan.moments + plan.moment_staging,
        gather_slots=plan.gather_slots,
        grad_slots=plan.grad_slots,
        host=plan.host_moments,
    )


def _verdict(found: Estimate) -> str:
    if not found.fits:
        return f"does not fit: {shortage(found.memory, found.gpu)}"
    if found.why_no_price:
        return f"fits; no time: {found.why_no_price}"
    return (
        f"fits; about {found.time.total:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s, "
        f"wall: {found.wall}"
    )


def host_bytes(config: Config, found: Estimate) -> int:
    """Of one rank: what is offloaded, and the copy of the state that background saves write."""
    has_copy = config.checkpoint.asynchronous and config.checkpoint.interval > 0
    if not has_copy:
        return found.memory.host
    kept = state_bytes(Job.of(config), Setting.of(config, found.num_ranks))
    return found.memory.host + kept.main_weights + kept.moments + kept.host


def expert_bytes(config: Config, world_size: int) -> float:
    """What a rank sends to and from experts in a step, under balanced routing."""
    return estimate_traffic(Job.of(config), Setting.of(config, world_size)).experts


def plan_run(config: Config, world_size: int) -> tuple[MemoryPlan, int]:
    """The engine's memory plan of one rank of a native decoder, or of a folder's with adapters, and the bytes
    of its activations."""
    degrees = resolve_degrees(config.mesh, world_size)
    model = _split_model(config, PlannedMeshes(degrees))
    apply_recipe(model, config.precision)
    moments = moment_bytes(moment_policy(config.optim)) if config.optim.name == "adamw" else None
    setting, job = Setting.of(config, world_size), Job.of(config)
    plan = plan_memory(
        model,
        degrees,
        FSDPPolicy(fsdp=config.fsdp, precision=config.precision, grad_divisor=1.0),
        moments=moments,
        moment_dtype=None,
        micro_batches=setting.num_micro_batches(job),
    )
    return plan, activation_bytes(job, setting)


def _split_model(config: Config, at: PlannedMeshes) -> nn.Module:
    """The model with the parameters of one rank. A folder's without adapters stands for a native decoder of
    its shapes: then all weights are trained, and names do not matter."""
    if config.model.hf is not None and config.adapter.is_on:
        return _split_folder_model(config, at)
    native = config.model if config.model.hf is None else replace(config.model, hf=None)
    decoder = build_model(native, config.experts)
    split_tensors(decoder, at)
    for module in decoder.modules():
        if isinstance(module, MoE):
            split_experts(module.experts, at)
    keep_frozen_in_fp8(decoder, config.precision, at)
    return decoder


def _split_folder_model(config: Config, at: PlannedMeshes) -> nn.Module:
    assert config.model.hf is not None
    model = build_folder_model(config.model.hf, config.adapter)
    layers = decoder_layers(model)
    experts = split_wrapped(model, at)
    keep_frozen_in_fp8(model, config.precision, at, experts)
    prepare_parts(model, layers, config.memory)
    return model
