"""Bytes on one rank at the peak of a step, by what they are for.

Weights, gradients, moments and slots are those that the engine and the optimizer plan
(:mod:`fsdmoe.fsdp.memory_plan`); activations are the sums of :mod:`fsdmoe.plan.activations`; the rest is what
a step needs for a moment: the logits of a chunk, the rows of one layer's experts in backward, a layer that is
made again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fsdmoe.models.config import ModelConfig
from fsdmoe.models.head import CHUNK_TOKENS, LEAN_CHUNK_TOKENS
from fsdmoe.plan.activations import (
    FP32,
    ROW_ALIGNMENT,
    KeptTensor,
    LayerKind,
    LayerView,
    expert_layout,
    expert_numel,
    kept_bytes,
    layer_tensors,
    received_rows,
    root_tensors,
)
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.job import Job, Setting, memory_plan

CONTEXT_ALONE = int(0.6 * GIB)
"""The CUDA context and the libraries' workspaces."""
CONTEXT_WITH_OTHERS = int(2.0 * GIB)
"""The same with communicators."""
SLACK = 0.03
"""Of what is allocated and freed within a step: what an allocator cannot use between its blocks."""
LAYERS_ON_THEIR_WAY = 1
"""Layers whose offloaded tensors are still, or again, on the device."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank; all fields but the last are on the device."""

    weights: int = 0
    """Shards in compute precision."""
    main_weights: int = 0
    gradients: int = 0
    moments: int = 0
    gather_slots: int = 0
    grad_slots: int = 0
    activations: int = 0
    loss: int = 0
    """Logits of a chunk, and the gradient that the loss makes in forward."""
    layer_workspace: int = 0
    """The most that one layer needs for a moment: its experts' rows, or what it makes again."""
    dispatch: int = 0
    """Rows on their way to and from other ranks."""
    context: int = 0
    slack: int = 0
    host: int = 0
    """Host memory of the rank."""

    @property
    def total(self) -> int:
        """On the device."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "host")

    @property
    def states(self) -> int:
        """Weights, gradients and moments."""
        return self.weights + self.main_weights + self.gradients + self.moments


def state_bytes(job: Job, setting: Setting) -> MemoryEstimate:
    """What the engine and the optimizer hold, whatever the micro-batch."""
    plan = memory_plan(job, setting)
    return MemoryEstimate(
        weights=plan.weights,
        main_weights=plan.main_weights,
        gradients=plan.gradients,
        moments=plan.moments + plan.moment_staging,
        gather_slots=plan.gather_slots,
        grad_slots=plan.grad_slots,
        host=plan.host_moments,
    )


def layer_view(job: Job, setting: Setting) -> LayerView:
    degrees = setting.degrees
    cloning = setting.cloning(job)
    return LayerView(
        itemsize=setting.param_bytes,
        tp=degrees.tp,
        ep=degrees.ep,
        etp=degrees.etp,
        dispatcher=setting.dispatcher,
        flex_rows=setting.experts.flex.rows,
        skew=setting.skew(job).memory,
        is_fused=not job.has_plain_layers,
        coded=_coded_parts(setting),
        keeps_rows=setting.memory.keep == "rows",
        clones=0 if cloning is None else cloning.slots,
        kept_clone_bytes=setting.expert_bytes if cloning is not None and setting.experts.clone_keep else 0,
    )


def _coded_parts(setting: Setting) -> frozenset[str]:
    """Whose layers keep codes. None where some of them stay in their own precision: then all are counted as
    values, which is more than there will be."""
    precision = setting.precision
    kept = precision.keep_first_layers or precision.keep_last_layers or precision.keep
    if setting.memory.keep != "codes" or kept:
        return frozenset()
    return frozenset(precision.covers)


def layer_counts(model: ModelConfig) -> dict[LayerKind, int]:
    counts: dict[LayerKind, int] = {
        "dense": model.first_k_dense_replace,
        "moe": model.num_moe_layers,
        "depth": model.num_nextn_predict_layers,
    }
    return {kind: count for kind, count in counts.items() if count}


def recomputing_counts(job: Job, setting: Setting) -> dict[LayerKind, int]:
    """Of each kind of layer, how many recompute (``memory.layers``)."""
    counts, memory, first = layer_counts(job.model), setting.memory, 0
    if memory.layers == "all":
        return counts
    found: dict[LayerKind, int] = {}
    total = sum(counts.values())
    for kind, count in counts.items():
        found[kind] = sum(bool(memory.parts_at(index, total)) for index in range(first, first + count))
        first += count
    return found


def activation_bytes(job: Job, setting: Setting) -> int:
    """Kept for backward by one micro-batch, wherever it is kept."""
    model, view, tokens = job.model, layer_view(job, setting), setting.tokens(job)
    kept = kept_bytes(root_tensors(model, view), tokens, frozenset())
    recomputing = recomputing_counts(job, setting)
    for kind, count in layer_counts(model).items():
        tensors, less = layer_tensors(model, kind, view), recomputing[kind]
        kept += less * kept_bytes(tensors, tokens, setting.recompute)
        kept += (count - less) * kept_bytes(tensors, tokens, frozenset())
    return kept


@dataclass(frozen=True)
class StepBytes:
    """What a micro-batch needs in addition to the states. It depends on the micro-batch's tokens, on what
    splits them, and on :func:`makes_head_gradient_in_slot`; not on how states are sharded otherwise."""

    kept: int
    """For backward, wherever it waits."""
    offloaded: int
    """Of that, in host memory."""
    loss: int
    workspace: int
    dispatch: int


def step_bytes(job: Job, setting: Setting) -> StepBytes:
    tokens, view, size = setting.tokens(job), layer_view(job, setting), setting.param_bytes
    stream = tokens * job.model.hidden_size * size
    offloaded = offloaded_bytes(job, setting)
    staged = LAYERS_ON_THEIR_WAY * offloaded // max(1, sum(layer_counts(job.model).values()))
    return StepBytes(
        kept=activation_bytes(job, setting),
        offloaded=offloaded,
        loss=_loss_bytes(job, setting, tokens),
        workspace=2 * stream + staged + _layer_workspace(job, setting, tokens, view),
        dispatch=_dispatch_bytes(job, setting, tokens),
    )


def estimate_memory(
    job: Job, setting: Setting, states: MemoryEstimate | None = None, step: StepBytes | None = None
) -> MemoryEstimate:
    """All of it. A search hands in what it knows from settings that share ``states`` or ``step``."""
    states = state_bytes(job, setting) if states is None else states
    step = step_bytes(job, setting) if step is None else step
    kept = step.kept - step.offloaded
    # The loss is done when the last layer begins its backward: of the two, the larger is the peak.
    momentary = max(step.loss, step.workspace)
    lends = setting.fsdp.lends_grads(setting.num_micro_batches(job)) and not setting.fsdp.cpu_offload
    lent = states.gradients if lends else 0
    found = replace(
        states,
        gradients=states.gradients - min(lent, kept),
        activations=kept,
        loss=step.loss,
        layer_workspace=momentary - step.loss,
        dispatch=step.dispatch,
        context=CONTEXT_ALONE if setting.degrees.world_size == 1 else CONTEXT_WITH_OTHERS,
        slack=round(SLACK * (kept + momentary + step.dispatch)),
        host=states.host + step.offloaded,
    )
    return _moved_to_host(found) if setting.fsdp.cpu_offload else found


def offloaded_bytes(job: Job, setting: Setting) -> int:
    """Of the activations, what waits in host memory: the named ones of all layers but the last."""
    if not setting.offload:
        return 0
    view, tokens = layer_view(job, setting), setting.tokens(job)
    num_layers = sum(layer_counts(job.model).values())
    share = max(0, num_layers - setting.memory.offload_keep_last) / num_layers
    total = 0
    for kind, count in layer_counts(job.model).items():
        tensors = layer_tensors(job.model, kind, view)
        tensors = tensors[:1] if "layer" in setting.recompute else tensors
        kept = [t for t in tensors if setting.recompute.isdisjoint(t.freed_by)]
        moved = tuple(t for t in kept if t.activation in setting.offload)
        total += count * kept_bytes(moved, tokens, frozenset())
    limit = setting.memory.offload_limit_gib * GIB
    return round(min(share * total, limit) if limit else share * total)


def _moved_to_host(found: MemoryEstimate) -> MemoryEstimate:
    return replace(found, weights=0, main_weights=0, gradients=0, moments=0, host=found.host + found.states)


def held_by_losses(job: Job, setting: Setting) -> int:
    """Gradients that losses make in forward and hold until backward: one of the hidden states for each loss,
    and one of the head's weight in fp32. The latter takes no memory of its own where it is made in the slot
    of the head's gradient."""
    losses = 1 + job.model.num_nextn_predict_layers
    stream = setting.tokens(job) * setting.degrees.tp * job.model.hidden_size * setting.param_bytes
    vocab = job.model.vocab_size // setting.degrees.tp
    weight = 0 if makes_head_gradient_in_slot(setting) else vocab * job.model.hidden_size * FP32
    return losses * stream + weight


def makes_head_gradient_in_slot(setting: Setting) -> bool:
    """Whether the slot that the head's gradient is reduced from is in fp32."""
    is_sharded = setting.degrees.dp_shard * setting.degrees.cp > 1
    return (setting.reduce_bytes if is_sharded else setting.grad_bytes) == FP32


def _loss_bytes(job: Job, setting: Setting, tokens: int) -> int:
    """Of the head: a chunk's logits, what each loss is given, and what they hold until backward."""
    model, tp, size = job.model, setting.degrees.tp, setting.param_bytes
    seen = tokens * tp
    chunk = min(LEAN_CHUNK_TOKENS if setting.memory.wants_small_chunks else CHUNK_TOKENS, seen)
    width = size if tp == 1 else size + FP32
    given = (1 + model.num_nextn_predict_layers) * seen * model.hidden_size * size
    if setting.precision.head == "fp8":  # codes of the weight, both ways round
        given += 2 * model.hidden_size * (model.vocab_size // tp)
    return held_by_losses(job, setting) + chunk * (model.vocab_size // tp) * width + given


def _layer_workspace(job: Job, setting: Setting, tokens: int, view: LayerView) -> int:
    """Of the hungriest layer: its experts' rows in backward, and what it has to make again."""
    model, size = job.model, setting.param_bytes
    most = 0
    for kind in layer_counts(model):
        tensors: tuple[KeptTensor, ...] = layer_tensors(model, kind, view)
        remade = kept_bytes(tensors, tokens, frozenset()) - kept_bytes(tensors, tokens, setting.recompute)
        if kind == "dense":
            rows = tokens * 2 * model.intermediate_size
        else:
            width = model.moe_latent_size or model.hidden_size
            local = model.num_experts // view.ep + view.clones
            padding = ROW_ALIGNMENT * local
            placed = tokens * model.num_experts_per_tok * view.etp + padding
            # Gradients of the outputs, of the activation and of what it was made from; where weight gradients
            # wait until inputs' are on their way back, those too.
            widths = width * (2 if view.ep * view.etp > 1 else 1)
            # Decoded, the pre-activation of the layer under way is two widths more.
            inner = (5 if "experts" in view.coded else 3) * (model.moe_intermediate_size // view.etp)
            rows = placed * (widths + inner)
            if view.clones:  # own weights with those of clones behind them, and gradients of these
                rows += local * expert_numel(model)
                remade += view.clones * expert_numel(model) * FP32
        most = max(most, rows * size + remade + _decoded_bytes(job, setting, kind, view))
    return most


def _decoded_bytes(job: Job, setting: Setting, kind: LayerKind, view: LayerView) -> int:
    """Of a layer's frozen weights that are kept as codes: the values of all experts, or of one projection.
    Where kernels multiply by the codes, these once more, transposed for backward."""
    model, precision = job.model, setting.precision
    if precision.frozen_dtype is None:
        return 0
    takes_codes = (
        precision.recipe != "bf16"
        and not precision.emulate
        and ("dense" if kind == "dense" else "experts") in precision.covers
    )
    if kind == "dense":
        numel = model.hidden_size * model.intermediate_size
    else:
        width = model.moe_latent_size or model.hidden_size
        numel = 3 * width * model.moe_intermediate_size * model.num_experts // view.ep
    return numel * (1 if takes_codes else setting.param_bytes)


def _dispatch_bytes(job: Job, setting: Setting, tokens: int) -> int:
    """Sent and received rows, while they are both there."""
    model, degrees = job.model, setting.degrees
    if degrees.ep * degrees.etp == 1 or not model.num_moe_layers:
        return 0
    layout = expert_layout(model, degrees.ep, degrees.etp)
    is_flex = setting.dispatcher == "flex"
    share = setting.experts.flex.rows if is_flex else setting.skew(job).memory
    cloning = setting.cloning(job)
    rows = received_rows(layout, setting.dispatcher, share, has_clones=cloning is not None)
    if setting.dispatcher == "by_node":  # what other nodes sent to be handed on
        rows += layout.rows_between_nodes("by_node")
    width = model.moe_latent_size or model.hidden_size
    slots = 0  # of flex, for weights and gradients of clones: all layers share them
    if is_flex and cloning is not None:
        slots = cloning.slots * expert_numel(model) * (setting.expert_bytes + FP32)
    return round(2 * rows * tokens * width * setting.param_bytes) + slots
