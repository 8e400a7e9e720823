"""Seconds of a step, from what is computed and what is sent.

A micro-batch passes the layers forward and back. In each layer the products, the exchange of rows with
experts and what ``tp`` and ``cp`` send stand in line; the next layer's weights are gathered and the last
one's gradients reduced concurrently, so a layer takes the longer of the two lines::

    forward    compute + experts' rows + tp + cp     |  gather
    backward   2 x compute + the same + recompute    |  gather + reduce

Of rows in chunks or sub-batches only what compute does not hide stands in the line
(:mod:`fsdmoe.plan.overlap`).

Products reach a share of the GPU's rate that grows with their size. For the experts it was fitted to whole
layers measured on one H200 (widths 768 to 14,336; 128 to 4,096 rows an expert):

    rate(n, rows) = matmul * n / (n + 150) * rows / (rows + 145)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fsdmoe.experts.dispatch.chunks import chunk_shares
from fsdmoe.fsdp.config import FSDPConfig
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.flops import forward_flops_per_token
from fsdmoe.plan.hardware import Gpu
from fsdmoe.plan.job import Job, Setting, engine_plan, memory_plan
from fsdmoe.plan.low_precision import faster_parts
from fsdmoe.plan.memory import layer_counts, offloaded_bytes, recomputing_counts
from fsdmoe.plan.overlap import Side, unhidden, unhidden_in_sub_batches
from fsdmoe.plan.traffic import (
    ShardingSeconds,
    clone_seconds,
    context_traffic,
    exchange_seconds,
    expert_legs,
    expert_seconds,
    sharding_seconds,
    tensor_traffic,
)

WIDTH_OF_HALF_RATE = 150
ROWS_OF_HALF_RATE = 145
TOKENS_OF_HALF_RATE = 250
"""Of dense products: rows at which they reach half of their rate."""
ELEMENTWISE_OF_HIDDEN = 28
ELEMENTWISE_OF_HEADS = 18
"""Passes over the residual stream and over queries and keys: norms, positions, sums, forward and back."""
HOST_SECONDS = 0.7e-3
"""What the host needs to launch one layer's forward: a shorter one waits for it. Backward: twice that."""
HOST_SECONDS_OF_CHUNK = 1.3e-3
"""What the host needs to launch one more chunk of a layer's rows, forward; backward: twice that. Of a step of
four layers on one H200 under an emulated fabric, whose own launches are in it."""
ROW_PASSES = 4
"""Over rows that are sent, on each of their ways: they are packed, written, read where they land, and sorted
or summed."""
COST_OF_HIDING = 0.15
"""Seconds that compute loses for each second of a collective that runs concurrently: they share
multiprocessors, memory and power."""
PLAIN_LAYERS_SHARE = 0.74
"""Of a native decoder's rate of products and attention, what a wrapped model reaches with train.fused_layers
= false: 258.6 ms a step for 200.2. With fused layers it reaches all of it: 197.3 for 200.0
(docs/results/train_step.md; ``python benchmarks/train_step.py --contenders fsdmoe 'fsdmoe wrapped as is'
'fsdmoe wrapped, all kept' --rounds 1 --seconds 3``)."""

ADAPTER_SHARE = 1.15
"""Of the speed of the same layers, all trained, what they reach with adapters on attention and all experts:
frozen weights have no gradient, but every product has two thin ones next to it, an expert's factors of their
own. Fitted to four runs (docs/results/adapters.md: rank 8, 16,384 and 4,096 tokens, layers recomputed and
not; ``python benchmarks/adapters.py``)."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of a step, by what they go to; what is hidden behind compute is not in them."""

    compute: float
    """Products, attention and what lies between, once forward and back."""
    recompute: float
    """What backward makes again."""
    experts: float
    """Exchange of rows."""
    tensor: float
    context: float
    sharding: float
    """Of gathers and reductions, what compute cannot hide, and what hiding costs it."""
    offload: float
    """Of copies to the host and back, what compute cannot hide."""
    optimizer: float

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def communication(self) -> float:
        """What ranks wait for each other."""
        return self.experts + self.tensor + self.context + self.sharding

    @property
    def memory(self) -> float:
        """What saving memory costs."""
        return self.recompute + self.offload


@dataclass(frozen=True)
class _LayerSeconds:
    """Of one layer of a kind, forward, for one micro-batch."""

    compute: float
    recompute: float
    experts: float = 0.0
    experts_backward: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    context_backward: float = 0.0


def estimate_time(job: Job, setting: Setting, gpu: Gpu) -> TimeEstimate:
    model, times = job.model, setting.num_micro_batches(job)
    recomputing = recomputing_counts(job, setting)
    layers = _Layers(job, setting, gpu)
    totals = dict.fromkeys(("compute", "recompute", "experts", "tensor", "context", "sharding"), 0.0)
    plan = engine_plan(job, setting)
    units, sending = plan.layers, sharding_seconds(plan, gpu)
    first = {"dense": 0, "moe": model.first_k_dense_replace, "depth": model.num_hidden_layers}
    kinds = layer_counts(model)
    for kind, count in kinds.items():
        at = layers.seconds(kind)
        share = recomputing[kind] / count
        again = share if "layer" in setting.recompute else 0.0
        sent = sending[units[min(first[kind], len(units) - 1)].name]
        forward = at.compute + at.experts + at.tensor + at.context
        backward = (
            2 * at.compute + share * at.recompute + at.experts_backward + at.tensor + at.context_backward
        )
        backward += again * (at.experts + at.tensor + at.context)
        number = count * times
        totals["compute"] += number * 3 * at.compute
        totals["recompute"] += number * share * at.recompute
        totals["experts"] += number * ((1 + again) * at.experts + at.experts_backward)
        totals["tensor"] += number * (2 + again) * at.tensor
        totals["context"] += number * ((1 + again) * at.context + at.context_backward)
        totals["sharding"] += count * _sharding_waits(setting.fsdp, sent, forward, backward, times)
    head = layers.head_seconds()
    totals["compute"] += times * head
    totals["sharding"] += _edges(job, setting, gpu, times, head)
    forward_time = (totals["compute"] + totals["experts"]) / 3 / times
    optimizer = _optimizer_seconds(job, setting, gpu)
    offload = times * _offload_seconds(job, setting, gpu, forward_time)
    layers_time = forward_time - head / 3
    offload += _moment_seconds(job, setting, gpu, layers_time + optimizer, sum(totals.values()) + optimizer)
    return TimeEstimate(**totals, offload=offload, optimizer=optimizer)


def _wait(sending: float, beside: float) -> float:
    """What a collective adds to the compute that runs concurrently."""
    return max(0.0, sending - beside) + COST_OF_HIDING * min(sending, beside)


def _sharding_waits(
    fsdp: FSDPConfig, sent: ShardingSeconds, forward: float, backward: float, times: int
) -> float:
    """What gathers and reductions add to a layer in a step. Weights that are kept are gathered for the first
    micro-batch alone, gradients that are kept are reduced after the last."""
    gather = 0.0 if fsdp.keeps_params else sent.gather
    reductions = 1 if fsdp.keeps_grads else times
    waits = (1 if fsdp.keeps_params else times) * _wait(sent.gather, forward)
    waits += reductions * _wait(gather + sent.reduce, backward)
    return waits + (times - reductions) * _wait(gather, backward)


class _Layers:
    """Seconds of the layers of one job under one setting."""

    def __init__(self, job: Job, setting: Setting, gpu: Gpu) -> None:
        self._job, self._setting, self._gpu = job, setting, gpu
        self._tokens = setting.tokens(job)
        self._flops = _flops_by_layer(job.model, job.seq_len)
        self._share = PLAIN_LAYERS_SHARE if job.has_plain_layers else 1.0
        if job.has_adapters:
            self._share *= ADAPTER_SHARE
        self._faster = faster_parts(setting.precision, gpu)
        self._host_seconds = 0.0 if setting.is_replayed else HOST_SECONDS
        self._host_seconds_of_chunk = 0.0 if setting.is_replayed else HOST_SECONDS_OF_CHUNK

    def seconds(self, kind: str) -> _LayerSeconds:
        job, setting, gpu, flops = self._job, self._setting, self._gpu, self._flops
        model, d = job.model, setting.degrees
        dense = self._dense_rate("attention" if not job.is_wrapped else "")
        parts = {
            "projections": flops["projections"] / dense,
            "attention": flops["attention"] / (gpu.attention * self._share),
            "elementwise": self._elementwise(),
        }
        if kind == "dense":
            parts["mlp"] = flops["dense_mlp"] / self._dense_rate("dense")
        else:
            parts["router"] = flops["router"] / dense
            parts["experts"] = setting.skew(job).time * flops["experts"] / self._expert_rate()
            parts["shared_experts"] = flops["shared_experts"] / self._dense_rate("shared")
        if kind == "depth":
            parts["join"] = 4 * model.hidden_size**2 / dense
        parts = {name: seconds * self._tokens for name, seconds in parts.items()}
        parts["start"] = gpu.layer_start
        if kind != "dense" and d.ep * d.etp > 1:
            parts["rows"] = ROW_PASSES * sum(expert_legs(job, setting, gpu.domain)) / 3 / gpu.memory_bandwidth
        compute = max(sum(parts.values()), self._host_seconds)
        found = _LayerSeconds(
            compute, self._recompute(parts, compute), tensor=self._tensor_seconds(kind == "dense")
        )
        if d.cp > 1:
            sent = context_traffic(job, setting)
            seconds = [exchange_seconds(gpu, each, d.cp, d.tp) for each in sent]
            if setting.context.mode == "ring":  # passed on under the attention of the block before
                hidden = parts["attention"] * (d.cp - 1) / d.cp
                seconds = [max(0.0, seconds[0] - hidden), max(0.0, seconds[1] - 2 * hidden)]
            found = replace(found, context=seconds[0], context_backward=seconds[1])
        if kind != "dense" and d.ep * d.etp > 1:
            if setting.experts.sub_batches > 1 and kind == "moe":
                forward, backward = self._waits_of_sub_batches(parts)
            else:
                forward, backward = self._waits_for_rows(parts["experts"], parts["shared_experts"])
            clones = clone_seconds(job, setting, gpu)
            found = replace(
                found, experts=forward + clones.forward, experts_backward=backward + clones.backward
            )
        return found

    def _waits_for_rows(self, compute: float, beside: float) -> tuple[float, float]:
        """Forward and backward. ``beside``: shared experts, computed while rows are under way."""
        chunks = self._setting.experts.chunks
        out, back, grad_out, grad_back, again = expert_seconds(self._job, self._setting, self._gpu)
        grad_out += again
        # Weights' gradients, as long as a forward, are computed while the first chunk's rows' go home.
        share = chunk_shares(chunks)[0] / sum(chunk_shares(chunks))
        late = share * min(grad_back, compute)
        if chunks == 1:
            return max(0.0, out + back - beside), max(0.0, grad_out + grad_back - late - 2 * beside)
        slower = compute * (self._expert_rate() / self._expert_rate(chunks) - 1)
        waits = []
        # Backward from its end: what comes back last is what went out first.
        for times, first, last in ((1, out, back), (2, grad_back, grad_out)):
            wait = unhidden(first, last, times * (compute + slower), times * beside, chunks)
            wait = wait if times == 1 else max(0.0, wait - late)
            busy = times * (compute + slower) + wait
            behind = max(0.0, times * chunks * self._host_seconds_of_chunk - busy)
            waits.append(wait + behind + times * slower + COST_OF_HIDING * max(0.0, first + last - wait))
        return waits[0], waits[1]

    def _waits_of_sub_batches(self, parts: dict[str, float]) -> tuple[float, float]:
        """Forward and backward, of a layer with ``parts`` seconds of compute."""
        number = self._setting.experts.sub_batches
        legs = expert_seconds(self._job, self._setting, self._gpu)
        dense = self._dense_rate("") / self._dense_rate("", number)
        slower = {
            "attention": 1.0,
            "elementwise": 1.0,
            "experts": self._expert_rate() / self._expert_rate(number),
        }
        took = {name: seconds * slower.get(name, dense) for name, seconds in parts.items()}
        experts, shared = took.pop("experts"), took.pop("shared_experts")
        attention = sum(took.values())
        sides = (
            (Side(attention, legs.out, after=shared), Side(experts, legs.back)),
            # Weights' gradients, as long as a forward, are computed while rows' go home.
            (
                Side(2 * attention, legs.grad_out, before=2 * shared),
                Side(experts, legs.grad_back, after=experts),
            ),
        )
        waits = []
        for times, (first, second) in enumerate(sides, 1):
            wait = unhidden_in_sub_batches(first, second, number)
            compute = times * (attention + shared + experts)
            launching = self._host_seconds + self._host_seconds_of_chunk
            behind = times * number * launching - compute - wait
            hidden = max(0.0, first.travels + second.travels - wait)
            extra = compute - times * sum(parts.values())
            waits.append(wait + max(0.0, behind) + extra + COST_OF_HIDING * hidden)
        return waits[0], waits[1]

    def head_seconds(self) -> float:
        """All three products of the head, and of every depth's pass through it."""
        rate = self._gpu.matmul * self._share
        return 3 * self._flops["head"] * self._tokens / rate

    def _dense_rate(self, part: str, sub_batches: int = 1) -> float:
        tokens = self._tokens * self._setting.degrees.tp / sub_batches
        rate = self._gpu.matmul * tokens / (tokens + TOKENS_OF_HALF_RATE)
        return rate * self._low_gain(part) * self._share

    def _expert_rate(self, chunks: int = 1) -> float:
        model, d = self._job.model, self._setting.degrees
        rows = self._tokens * model.num_experts_per_tok * d.ep * d.etp / model.num_experts / chunks
        width = model.moe_intermediate_size / d.etp
        rate = self._gpu.matmul * width / (width + WIDTH_OF_HALF_RATE) * rows / (rows + ROWS_OF_HALF_RATE)
        return rate * self._low_gain("experts") * self._share

    def _low_gain(self, part: str) -> float:
        return self._gpu.low_precision_gain if part in self._faster else 1.0

    def _elementwise(self) -> float:
        """A third of the passes over memory: backward makes the other two."""
        model = self._job.model
        heads = model.num_attention_heads + model.num_key_value_heads
        width = model.head_dim
        if model.is_mla:
            heads, width = 2 * model.num_attention_heads, model.qk_nope_head_dim + model.qk_rope_head_dim
        passes = ELEMENTWISE_OF_HIDDEN * model.hidden_size + ELEMENTWISE_OF_HEADS * heads * width
        return passes * self._setting.param_bytes / 3 / self._gpu.memory_bandwidth

    def _tensor_seconds(self, is_dense: bool) -> float:
        sent = tensor_traffic(self._job, self._setting, is_dense=is_dense)
        return exchange_seconds(self._gpu, sent, self._setting.degrees.tp)

    def _recompute(self, parts: dict[str, float], compute: float) -> float:
        """Of one layer, what its parts cost a second time."""
        wanted, model = self._setting.recompute, self._job.model
        attention_again = 0.7 * parts["attention"]  # forward alone has a higher rate
        if "layer" in wanted:
            return compute - parts["attention"] + attention_again
        found = 0.0
        if "norms" in wanted:
            found += 0.4 * parts["elementwise"]
        if "activation" in wanted:
            found += 0.1 * parts["elementwise"]
        if "attention_projections" in wanted:
            found += 0.6 * parts["projections"]
        elif "mla_up" in wanted and model.is_mla:
            found += 0.3 * parts["projections"] + 0.3 * parts["elementwise"]
        if "attention" in wanted:
            found += attention_again
        if "router" in wanted:
            found += parts.get("router", 0.0)
        if "shared_experts" in wanted:
            found += parts.get("shared_experts", 0.0) * 2 / 3
        if "experts" in wanted:
            found += parts.get("experts", 0.0) * 2 / 3
        return found


def _flops_by_layer(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Forward FLOPs of one token in one layer that has the part; the head's of all passes."""
    flops = forward_flops_per_token(model, seq_len)
    depths = model.num_nextn_predict_layers
    layers = model.num_hidden_layers + depths
    dense, moe = max(1, model.first_k_dense_replace), max(1, model.num_moe_layers + depths)
    counts = {
        "projections": layers, "attention": layers, "dense_mlp": dense, "router": moe, "experts": moe,
        "shared_experts": moe, "head": 1,
    }  # fmt: skip
    return {name: getattr(flops, name) / count for name, count in counts.items()}


def _edges(job: Job, setting: Setting, gpu: Gpu, times: int, head: float) -> float:
    """Gathers and reductions with nothing to hide behind: the first layer's and the vocabulary's weights,
    the last gradients, and the sum across replicas."""
    plan = engine_plan(job, setting)
    sending = sharding_seconds(plan, gpu)
    first = sending[plan.layers[0].name]
    wide = [sending[unit.name] for unit in plan.model.units if not unit.repeated]
    hidden = sum(each.gather + each.reduce for each in wide) - head
    waits = times * max(0.0, hidden) + first.gather + first.reduce
    outer = setting.degrees.dp_outer
    if outer > 1:
        waits += 2 * _shard(job, setting) * setting.grad_bytes * (outer - 1) / outer / gpu.network
    return waits


def _offload_seconds(job: Job, setting: Setting, gpu: Gpu, forward_time: float) -> float:
    """Of copies out during forward and back during backward, what is longer than the pass itself, and what
    the rest costs the kernels next to it. With ``fsdp.cpu_offload`` shards come up for every gather, and
    gradients go down."""
    out = back = offloaded_bytes(job, setting) / gpu.host_link
    if setting.fsdp.cpu_offload:
        shard = _shard(job, setting) / gpu.host_link
        out += shard * setting.param_bytes
        back += shard * (setting.param_bytes + setting.grad_bytes)
    return _wait(out, forward_time) + _wait(back, 2 * forward_time)


def _moment_seconds(job: Job, setting: Setting, gpu: Gpu, window: float, step: float) -> float:
    """Of moments that live in host memory, what the link takes longer than there is time: between the
    gradient's norm and the head of the next forward for those that the device had no space for, and in a
    whole step for all of them."""
    plan = memory_plan(job, setting)
    on_host = plan.host_moments
    late = max(0, on_host - plan.moment_staging)
    return max(0.0, late / gpu.host_link - window, on_host / gpu.host_link - step)


def _optimizer_seconds(job: Job, setting: Setting, gpu: Gpu) -> float:
    """A step reads the gradient, once more for its norm where it is clipped, reads and writes main weights
    and moments, and writes the weights where they are not the main weights themselves. Of adapters nothing is
    counted: they are about a hundredth of the weights."""
    if job.has_adapters:
        return 0.0
    plan = memory_plan(job, setting)
    reads = 2 if setting.optim.grad_clip else 1
    size = 2 * setting.main_bytes + reads * setting.grad_bytes
    size += setting.param_bytes if setting.precision.main_dtype != setting.precision.param_dtype else 0
    rate = gpu.host_bandwidth if setting.fsdp.cpu_offload else gpu.memory_bandwidth
    return (_shard(job, setting) * size + 2 * (plan.moments + plan.host_moments)) / rate


def _shard(job: Job, setting: Setting) -> float:
    """Elements whose states a rank has."""
    return memory_plan(job, setting).num_parameters / (setting.degrees.world_size / setting.degrees.dp_outer)
