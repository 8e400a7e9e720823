"""``train.py --dry-run [--world N]``: what a configuration costs on each rank, before anything is built.
Weights, gradients, moments and slots come from the planner that a real run uses; activations are what
autograd would keep of one micro-batch, counted on tensors without memory. Nothing is allocated, no process
group is started: a laptop can plan for 1,024 ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdmoe.config import Config
from fsdmoe.errors import ConfigError
from fsdmoe.experts.dispatch import ExpertLayout
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import split_experts
from fsdmoe.failures import own_rank
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import MemoryPlan, PlannedMeshes, plan_memory, saved_activations
from fsdmoe.kernels import packed_rows
from fsdmoe.memory.layers import keep_less
from fsdmoe.mesh import Degrees, resolve_degrees
from fsdmoe.models import Decoder, build_model
from fsdmoe.models.memory_parts import prepare_parts
from fsdmoe.observe import print_table
from fsdmoe.optim import moment_policy
from fsdmoe.optim.moments import moment_bytes
from fsdmoe.precision.config import torch_dtype
from fsdmoe.quantized_layers import apply_recipe
from fsdmoe.tensor_parallel.split import split_tensors

GIB = 2**30
GPU_GB = (80, 141)
"""Memory of an H100 and of an H200."""


def dry_run(config: Config, world_size: int) -> int:
    """Print the plan for ``world_size`` ranks; returns the exit code."""
    if own_rank() != 0:
        return 0
    try:
        plan, activations = plan_run(config, world_size)
    except ConfigError as error:
        print(f"fsdmoe: {error}", file=sys.stderr)
        return 2
    degrees = resolve_degrees(config.mesh, world_size)
    print_table(
        f"{world_size} ranks",
        ("axis", "size"),
        [(axis, str(size)) for axis, size in vars(degrees).items()],
    )
    device, host = _device_bytes(config, plan, activations), _host_bytes(config, plan)
    sizes = {
        "activations of a micro-batch (estimate)": activations,
        "everything on the device": device,
        "host memory (offload, copy for saves)": host,
        "rows to and from experts sent per step": expert_bytes(config, world_size),
    }
    rows = [*plan.table(), *((name, f"{size / GIB:.3f} GiB") for name, size in sizes.items())]
    rows.append(("micro-batches per step", str(_num_micro_batches(config, degrees))))
    rows += [(f"fits {gb} GB, a tenth spared", "yes" if device < 0.9e9 * gb else "no") for gb in GPU_GB]
    print_table(f"Per rank, {plan.num_parameters / 1e9:.3f} B parameters in all", ("what", "how much"), rows)
    print("sent and received: not counted are the exchanges of mesh.tp and mesh.cp")
    return 0


def _device_bytes(config: Config, plan: MemoryPlan, activations: int) -> int:
    offloaded = _offloaded_bytes(plan) if config.fsdp.cpu_offload else 0
    return plan.peak(activations) - offloaded


def _host_bytes(config: Config, plan: MemoryPlan) -> int:
    """Of one rank: what is offloaded, and the copy of the state that background saves write."""
    has_copy = config.checkpoint.asynchronous and config.checkpoint.interval > 0
    copy = plan.main_weights + plan.moments + plan.host_moments if has_copy else 0
    return copy + plan.host_moments + (_offloaded_bytes(plan) if config.fsdp.cpu_offload else 0)


def _offloaded_bytes(plan: MemoryPlan) -> int:
    return plan.weights + plan.main_weights + plan.gradients - plan.lent + plan.moments


def expert_bytes(config: Config, world_size: int) -> float:
    """What a rank sends to and from experts in a step, under balanced routing. Layers that are
    recomputed as a whole send forward's half twice."""
    model, mesh = config.model, config.mesh
    num_layers = model.num_hidden_layers - model.first_k_dense_replace + model.num_nextn_predict_layers
    num_tokens = config.train.global_batch_size * config.data.seq_len // world_size
    layout = ExpertLayout(model.num_experts, model.num_experts_per_tok, mesh.ep, mesh.etp)
    rows = layout.sent_rows(config.experts.dispatcher, num_tokens) / 4
    itemsize = torch_dtype(config.precision.param_dtype).itemsize
    width = model.moe_latent_size or model.hidden_size
    packed = width + -(-width // packed_rows.BLOCK)
    out = packed if config.experts.dispatch_dtype == "float8" else width * itemsize
    grad_out = packed if config.experts.dispatch_grad_dtype == "float8" else width * itemsize
    forward, backward = out + width * itemsize, grad_out + width * itemsize
    return rows * (num_layers * (forward + backward) + _num_repeated(config) * forward)


def _num_repeated(config: Config) -> int:
    """Layers with experts whose forward backward runs again."""
    model = config.model
    num_layers = model.num_hidden_layers + model.num_nextn_predict_layers
    moe_layers = range(model.first_k_dense_replace, num_layers)
    return sum("layer" in config.memory.parts_at(index, num_layers) for index in moe_layers)


def plan_run(config: Config, world_size: int) -> tuple[MemoryPlan, int]:
    """The memory plan of one rank, and the bytes of its activations."""
    degrees = resolve_degrees(config.mesh, world_size)
    model = build_model(config.model, config.experts)
    activations = _activations(config)
    split_tensors(model, PlannedMeshes(degrees))
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module.experts, PlannedMeshes(degrees))
    apply_recipe(model, config.precision)
    moments = moment_bytes(moment_policy(config.optim)) if config.optim.name == "adamw" else None
    plan = plan_memory(
        model,
        degrees,
        FSDPPolicy(fsdp=config.fsdp, precision=config.precision, grad_divisor=1.0),
        moments=moments,
        moment_dtype=None,
        micro_batches=_num_micro_batches(config, degrees),
    )
    return plan, activations


def _num_micro_batches(config: Config, degrees: Degrees) -> int:
    """Of one rank in a step; with dynamic context parallelism, if all of them were full."""
    train, context = config.train, config.context_parallel
    if context.dynamic:
        tokens = train.global_batch_size * config.data.seq_len
        return -(-tokens // (degrees.dp_outer * degrees.dp_shard * degrees.cp * context.max_tokens))
    return train.global_batch_size // (degrees.dp_outer * degrees.dp_shard) // train.micro_batch_size


def _activations(config: Config) -> int:
    """Kept for backward by one micro-batch. Under EP a rank computes as many rows as it sends, on average, so
    the unsplit layer stands for the split one; so it does, with its tokens, under tensor and context
    parallelism."""
    dtype = torch_dtype(config.precision.param_dtype)
    tokens = config.train.micro_batch_size * config.data.seq_len // (config.mesh.cp * config.mesh.tp)
    if config.context_parallel.dynamic:
        tokens = config.context_parallel.max_tokens // config.mesh.tp
    shape = (config.train.micro_batch_size, max(tokens // config.train.micro_batch_size, 1))
    experts = dataclasses.replace(config.experts, compute="grouped")  # a loop would look at the routing
    with FakeTensorMode():
        model = _with_default_dtype(dtype, lambda: Decoder(config.model, experts))
        tokens_BS = torch.zeros(shape, dtype=torch.int64)

        def kept() -> int:
            return saved_activations(
                lambda: model(tokens_BS, document_ids_BS=tokens_BS, labels_BS=tokens_BS).loss, model
            )

        layers = [*model.model.layers, *model.model.mtp_layers]
        once_more = kept() // len(layers) if "layer" in config.memory.recompute else 0
        prepare_parts(layers, config.memory)
        keep_less(layers, config.memory)
        return kept() + once_more  # a layer that backward runs again keeps all, one at a time


def _with_default_dtype(dtype: torch.dtype, build: Callable[[], Decoder]) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)
