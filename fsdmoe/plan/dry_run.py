"""``train.py --dry-run [--world N] [--gpu GPU]``: what a configuration costs on each rank.

Weights, gradients, moments and slots come from the planner that a real run uses; activations, workspaces,
traffic and time from the estimate that ``python -m fsdmoe.plan`` searches with. Nothing is allocated, no
process group is started: a laptop can plan for 1,024 ranks. Behind the plan stands what a run would be
refused for on this host, its files included (:mod:`fsdmoe.config.disk`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fsdmoe.config import Config
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.failures import own_rank
from fsdmoe.core.rules import size_text
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import MemoryPlan, PlannedMeshes, plan_memory
from fsdmoe.huggingface.memory_parts import prepare_parts
from fsdmoe.observe import print_table
from fsdmoe.optim import count_state
from fsdmoe.parallel.build import decoder_layers
from fsdmoe.plan.estimate import Estimate, estimate, shortage
from fsdmoe.plan.hardware import GIB, GPUS, NEVER_RAN, Gpu, gpu_asked
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import activation_bytes, state_bytes
from fsdmoe.plan.parameters import split_model
from fsdmoe.plan.recompute import decide_memory
from fsdmoe.plan.text import memory_rows, traffic_rows, without_zeros

SHOWN_GPUS = ("h100", "h200", "gb200")


def dry_run(config: Config, world_size: int, problems: Sequence[str] = (), gpu: str | None = None) -> int:
    """Print the plan for ``world_size`` ranks, and behind it the ``problems`` that files have and that the
    model has by itself; returns the exit code, which is 2 where there are any.

    ``gpu``: by name or memory; else those of ``SHOWN_GPUS`` are compared."""
    if own_rank() != 0:
        return 2 if problems else 0
    try:
        gpus = [gpu_asked(name) for name in ([gpu] if gpu is not None else SHOWN_GPUS)]
    except ConfigError as error:
        print(f"fsdmoe: {error}", file=sys.stderr)
        return 2
    refused = list(problems)
    try:
        _print_plan(config, world_size, gpus)
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


def _print_plan(config: Config, world_size: int, gpus: Sequence[Gpu]) -> None:
    job = Job.of(config)
    decisions = [decide_memory(config, world_size, gpu.memory) for gpu in gpus]
    found = [
        estimate(job, Setting.of(each.config, world_size), gpu)
        for each, gpu in zip(decisions, gpus, strict=True)
    ]
    config = decisions[0].config
    setting = Setting.of(config, world_size)
    plan, _ = plan_run(config, world_size)
    print_table(
        f"{world_size} rank" + ("s" if world_size > 1 else ""),
        ("axis", "size"),
        [(axis, str(size)) for axis, size in vars(setting.degrees).items()],
    )
    any_gpu = found[0]
    rows = plan.table()[:8]
    rows += [row for row in memory_rows(any_gpu.memory) if row[0] not in dict(plan.table())]
    rows.append(("host memory (offload, copy for saves)", size_text(host_bytes(config, any_gpu))))
    rows += traffic_rows(any_gpu.traffic)
    rows.append(("micro-batches per step", str(setting.num_micro_batches(job))))
    rows += [(f"on {each.gpu.name}, {each.gpu.memory / GIB:.0f} GiB", _verdict(each)) for each in found]
    rows += [
        (f"{key} on {gpu.name}", why)
        for gpu, each in zip(gpus, decisions, strict=True)
        for key, why in each.told.items()
    ]
    print_table(
        f"Per rank, {plan.num_parameters / 1e9:.3f} B parameters in all",
        ("what", "how much"),
        without_zeros(rows),
    )


def _verdict(found: Estimate) -> str:
    if not found.fits:
        return f"does not fit: {shortage(found.memory, found.gpu)}"
    if found.gpu.name not in GPUS:
        return "fits; no time: name the GPU for one"
    if found.why_no_price:
        return f"fits; no time: {found.why_no_price}"
    return (
        f"fits; about {found.time.total:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s, "
        f"wall: {found.wall}" + (f"; {NEVER_RAN}" if found.gpu.never_ran else "")
    )


def host_bytes(config: Config, found: Estimate) -> int:
    """Of one rank: what is offloaded, and the copy of the state that background saves write."""
    has_copy = config.checkpoint.asynchronous and config.checkpoint.interval > 0
    if not has_copy:
        return found.memory.host
    kept = state_bytes(Job.of(config), Setting.of(config, found.num_ranks))
    return found.memory.host + kept.main_weights + kept.moments + kept.host


def plan_run(config: Config, world_size: int) -> tuple[MemoryPlan, int]:
    """The memory plan of one rank, and the bytes of its activations.

    Raises:
        ConfigError: The model cannot be asked for what the configuration wants, which is known once it is
            built: a split, units that it has not, a recipe that covers nothing, parts that no layer has.
    """
    setting, job = Setting.of(config, world_size), Job.of(config)
    model = split_model(job.source(config.precision), PlannedMeshes(setting.degrees))
    if config.model.hf is not None:
        prepare_parts(model, decoder_layers(model), config.memory)
    plan = plan_memory(
        model,
        setting.degrees,
        FSDPPolicy(fsdp=config.fsdp, precision=config.precision, grad_divisor=1.0),
        moments=count_state(config.optim, config.precision),
        micro_batches=setting.num_micro_batches(job),
    )
    return plan, activation_bytes(job, setting)
