"""Bytes that one rank sends or receives in a step, by kind, and how fast the links carry them.

Ranks are numbered with ``tp`` innermost, then ``cp``, ``dp_shard`` and ``dp_outer``; ``ep x etp`` are
neighbours too. So the ranks of an axis stand a *stride* apart, and an axis stays inside an NVLink domain
where ``size * stride`` does. Beyond it, a collective that passes data along (gather, reduce) uses the network
cards of all its members in a domain at once; an exchange of everybody with everybody uses each rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fsdmoe.context_parallel.volume import AttentionShape
from fsdmoe.context_parallel.volume import sent_bytes as context_bytes
from fsdmoe.fsdp.memory_plan import sharding_traffic
from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.kernels import packed_rows
from fsdmoe.plan.activations import FP32, expert_layout, expert_numel
from fsdmoe.plan.hardware import Gpu
from fsdmoe.plan.job import Job, Setting, engine_plan, memory_plan
from fsdmoe.plan.memory import layer_counts, recomputing_counts
from fsdmoe.plan.parameters import EnginePlan
from fsdmoe.tensor_parallel.volume import sent_bytes as tensor_bytes

CLONES_SECONDS = 0.9e-3
"""Of a layer with clones, forward and backward, what is not counted below: of two runs of 40 layers on an
emulated node, in graphs and not (docs/results/emulated_run.md, recorded loads)."""
SHARE_BEYOND_A_DOMAIN = 0.75
"""Of the network cards of a domain, what a collective over several domains gets."""


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes of one rank in a whole step."""

    gathered: float = 0
    """Weights, over the shard axes."""
    reduced: float = 0
    """Gradients, over the shard axes."""
    replicated: float = 0
    """Gradients, across replicas."""
    experts: float = 0
    """Rows to experts and back, over ``ep`` and ``etp``."""
    tensor: float = 0
    context: float = 0
    host: float = 0
    """To host memory and back."""


class ShardingSeconds(NamedTuple):
    """What sharding takes a unit, once."""

    gather: float
    reduce: float


@lru_cache(maxsize=1024)
def sharding_seconds(plan: EnginePlan, gpu: Gpu) -> dict[str, ShardingSeconds]:
    """Of every unit, by its name."""
    distinct = {id(unit.groups): unit.groups for unit in plan.model.units}  # layers share theirs
    found = {key: _seconds(groups, plan, gpu) for key, groups in distinct.items()}
    return {unit.name: found[id(unit.groups)] for unit in plan.model.units}


def _seconds(groups: tuple[GroupPlan, ...], plan: EnginePlan, gpu: Gpu) -> ShardingSeconds:
    gather = reduce = 0.0
    for group in groups:
        size, others = group.layout.num_ranks, group.layout.numel - group.layout.slice_numel
        rate = collective_rate(gpu, size, plan.stride(group.axis))
        gather += group.bytes_of(others) / rate
        reduce += others * group.requires_grad * plan.policy.sent_grad_bytes / rate
    return ShardingSeconds(gather, reduce)


def collective_rate(gpu: Gpu, size: int, stride: int) -> float:
    """Bytes/s of a rank in a gather or a reduction over ``size`` ranks, ``stride`` apart."""
    if size * stride <= gpu.domain:
        return gpu.nvlink
    members = max(1, gpu.domain // stride)
    return min(gpu.nvlink, SHARE_BEYOND_A_DOMAIN * members * gpu.network)


def exchange_seconds(gpu: Gpu, nbytes: float, size: int, stride: int = 1) -> float:
    """Of an exchange in which a rank sends ``nbytes`` to the others, each as much."""
    if size == 1:
        return 0.0
    near = min(size, max(1, gpu.domain // stride))
    beyond = nbytes * (size - near) / (size - 1)
    return max((nbytes - beyond) / gpu.nvlink, beyond / gpu.network)


class LayerTraffic(NamedTuple):
    """What one layer sends for one micro-batch, forward and backward apart."""

    forward: float
    backward: float


class ExpertLegs(NamedTuple):
    """What one MoE layer sends for one micro-batch on each of its ways."""

    out: float
    """Rows to the experts."""
    back: float
    grad_out: float
    """Gradients to the experts."""
    grad_back: float
    again: float
    """Rows to the experts once more, next to these gradients: the mean over the layers."""


def expert_legs(job: Job, setting: Setting, domain: int = 8) -> ExpertLegs:
    """Under balanced routing, with nodes of ``domain`` ranks."""
    model, d = job.model, setting.degrees
    layout = expert_layout(model, d.ep, d.etp, domain)
    rows = layout.sent_rows(setting.dispatcher, setting.tokens(job)) / 4
    width = model.moe_latent_size or model.hidden_size
    plain, packed = width * setting.param_bytes, width + -(-width // packed_rows.BLOCK)
    out = packed if setting.experts.dispatch_dtype == "float8" else plain
    grad = packed if setting.experts.dispatch_grad_dtype == "float8" else plain
    again = _share_that_sends_again(job, setting)
    return ExpertLegs(rows * out, rows * plain, rows * grad, rows * plain, again * rows * out)


def _share_that_sends_again(job: Job, setting: Setting) -> float:
    """Of the layers with experts."""
    if "dispatch" not in setting.recompute:
        return 0.0
    recomputing, all_layers = recomputing_counts(job, setting), layer_counts(job.model)
    with_experts = [kind for kind in all_layers if kind != "dense"]
    return sum(recomputing[kind] for kind in with_experts) / sum(all_layers[kind] for kind in with_experts)


def expert_seconds(job: Job, setting: Setting, gpu: Gpu) -> ExpertLegs:
    """What rows of one MoE layer take on each of their ways, in one piece: as long as those of the
    busiest rank."""
    d = setting.degrees
    name = setting.dispatcher
    skew = setting.skew(job).time
    legs = ExpertLegs(*(skew * each for each in expert_legs(job, setting, gpu.domain)))
    if name != "by_node":
        return ExpertLegs(*(exchange_seconds(gpu, each, d.ep * d.etp) for each in legs))
    layout = expert_layout(job.model, d.ep, d.etp, gpu.domain)
    share = layout.rows_between_nodes(name) / layout.rows_per_token(name)
    # A row takes one exchange after the other.
    per_byte = share / gpu.network + (1 - share) / gpu.nvlink
    return ExpertLegs(*(each * per_byte for each in legs))


def expert_traffic(job: Job, setting: Setting) -> LayerTraffic:
    """Of one MoE layer, under balanced routing."""
    legs = expert_legs(job, setting)
    return LayerTraffic(legs.out + legs.back, legs.grad_out + legs.grad_back + legs.again)


def clone_seconds(job: Job, setting: Setting, gpu: Gpu) -> LayerTraffic:
    """What clones take one MoE layer for one micro-batch: their weights and, in float32, gradients on their
    way, and the copies of a rank's own experts that they are laid behind. Of a rank whose slots are full."""
    experts, d = setting.experts, setting.degrees
    if setting.cloning(job) is None:
        return LayerTraffic(0, 0)
    numel = expert_numel(job.model)
    sent = experts.clones * numel * setting.expert_bytes
    away = experts.clones * numel * FP32 + (0 if experts.clone_keep else sent)
    joined = (job.model.num_experts // d.ep + experts.clones) * numel * setting.expert_bytes
    copied = 2 * joined / gpu.memory_bandwidth + CLONES_SECONDS / 2
    return LayerTraffic(*(exchange_seconds(gpu, each, d.ep) + copied for each in (sent, away)))


def tensor_traffic(job: Job, setting: Setting, *, is_dense: bool) -> float:
    """Of one layer over ``tp``, forward; backward sends the same."""
    model, tp, tokens = job.model, setting.degrees.tp, setting.tokens(job)
    if tp == 1:
        return 0.0
    if model.is_mla and not job.is_wrapped:  # a wrapped model's attention is handed all tokens whole
        query = model.hidden_size if model.q_lora_rank is None else model.q_lora_rank
        gathered = query + model.kv_lora_rank + model.qk_rope_head_dim
    else:
        gathered = model.hidden_size
    sent = tensor_bytes(tokens, gathered, model.hidden_size, tp, setting.param_bytes)
    if is_dense:
        sent += tensor_bytes(tokens, model.hidden_size, model.hidden_size, tp, setting.param_bytes)
    return sent


def context_traffic(job: Job, setting: Setting) -> LayerTraffic:
    """Of one layer over ``cp``."""
    model, d = job.model, setting.degrees
    if d.cp == 1:
        return LayerTraffic(0, 0)
    width, value = model.head_dim, model.head_dim
    kv_heads = model.num_key_value_heads
    if model.is_mla:
        width, value = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
        kv_heads = model.num_attention_heads
    shape = AttentionShape(
        num_tokens=setting.tokens(job) * d.tp,
        num_heads=model.num_attention_heads // d.tp,
        num_kv_heads=max(1, kv_heads // d.tp),
        width=width,
        value_width=value,
        bytes_per_element=setting.param_bytes,
    )
    return LayerTraffic(*context_bytes(setting.context.mode, shape, d.cp))


def estimate_traffic(job: Job, setting: Setting, offloaded: int = 0) -> TrafficEstimate:
    """All of a step's. ``offloaded``: bytes of activations that go to the host in each micro-batch."""
    model, times = job.model, setting.num_micro_batches(job)
    repeated = sum(recomputing_counts(job, setting).values()) if "layer" in setting.recompute else 0
    num_moe = model.num_moe_layers + model.num_nextn_predict_layers
    num_layers = model.num_hidden_layers + model.num_nextn_predict_layers
    forwards = 1 + repeated / num_layers
    experts, context = expert_traffic(job, setting), context_traffic(job, setting)
    plain, dense = (tensor_traffic(job, setting, is_dense=is_dense) for is_dense in (False, True))
    tensor = (num_layers - model.first_k_dense_replace) * plain + model.first_k_dense_replace * dense
    if setting.degrees.tp > 1:  # embedding and head
        tensor += tensor_bytes(
            setting.tokens(job), model.hidden_size, model.hidden_size, setting.degrees.tp, setting.param_bytes
        )
    plan = engine_plan(job, setting)
    sharding = sharding_traffic(plan.model, plan.at, plan.policy, times)
    return TrafficEstimate(
        gathered=sharding.gathered,
        reduced=sharding.reduced,
        replicated=sharding.replicated,
        experts=times * num_moe * (forwards * experts.forward + experts.backward),
        tensor=times * (forwards + 1) * tensor,
        context=times * num_layers * (forwards * context.forward + context.backward),
        host=2 * (times * offloaded + memory_plan(job, setting).host_moments),
    )
