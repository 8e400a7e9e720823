"""A model, the meshes and the policies in; a parallel model out.

Order matters, and this is the only place that knows it::

    heads and columns split over tp  ->  experts split over ep and etp  ->  recipe  ->  recompute
        ->  flat sharding over what is left  ->  load

The expert and the sharding packages meet only here: the splits make DTensors, sharding reads their
placements.

The model may be one of fsdmoe's or any other: the experts of Hugging Face models, and whatever else an
adapter knows (:mod:`fsdmoe.huggingface.adapters`), are split in place; the rest of the model stays as it is.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import nn

from fsdmoe import checkpoint as checkpoints
from fsdmoe.config import Config
from fsdmoe.config.compatibility import has_rows_with, own_where_needed, refuse_sections
from fsdmoe.core.all_ranks import require_alike
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch.flex import FlexDispatcher, share_state
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.fsdp import (
    FSDPConfig,
    FSDPPolicy,
    LostParameters,
    agree_on_values,
    engine_of,
    refuse_hooked,
    refuse_sharded,
    shard_agreed,
)
from fsdmoe.huggingface.generation import follow_folder
from fsdmoe.huggingface.lora import has_factors, peel
from fsdmoe.huggingface.lora_life import connect_shell
from fsdmoe.huggingface.routing import policies_of
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.kernels.recipe_support import check_recipe
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import build_offload
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.decoder import Decoder
from fsdmoe.observe.ranges import name_ranges
from fsdmoe.parallel.auto_model import ModelKind, NativeKind, kind_of
from fsdmoe.parallel.frozen_layers import has_magnitudes, keep_frozen_in_codes
from fsdmoe.parallel.quantized_layers import apply_recipe, keep_codes
from fsdmoe.parallel.quantized_state import Figures, QuantizedState, state_of
from fsdmoe.parallel.rounded_layers import round_weights
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.operand_state import OperandState
from fsdmoe.precision.recipes import REPLACED
from fsdmoe.tensor_parallel.split import parallelize_tensors

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
_FLEX = "flex_state"


@dataclass(frozen=True, kw_only=True)
class ParallelPolicy:
    """Everything that ``parallelize`` decides by, apart from the meshes."""

    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Dispatcher, balance and capacity. ``record`` and ``replay`` are refused: take ``routing_tape``."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """What is sharded, when it is gathered and reduced."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats of weights, gradients and main weights."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What backward computes again instead of keeping it, and what waits in host memory."""
    fused_layers: bool = True
    """Norms, projections, rotary positions, routers and attention of a wrapped model are computed as in
    fsdmoe's own decoders, where they compute the same."""
    seed: int = 0
    """Of the initial weights, with each parameter's name."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights of fsdmoe's own decoders."""
    ranges: bool = False
    """Name each layer's forward and backward in profiles."""
    grad_divisor: float | None = None
    """1 for a loss that is already divided by its global count; None divides by the ranks that compute a
    loss, so that a per-rank mean loss behaves as under data parallelism."""
    repeats_steps: bool = False
    """The loop calls :func:`must_repeat` after every step, and runs it again if so: with the ``flex``
    dispatcher no layer then waits for the device. In any other loop each layer looks itself."""
    sharding: FSDPPolicy = field(init=False, repr=False, compare=False)
    """What ``fully_shard`` is given of all this."""
    depends_on_meshes: bool = field(init=False, repr=False, compare=False)
    """Some meshes may not go with it, by the table of what goes with what. Any go with a plain policy."""
    depends_on_model: bool = field(init=False, repr=False, compare=False)
    """The same of wrapped models."""

    def __post_init__(self) -> None:
        _refuse_tapes(self.experts)
        sections = self.sections()
        object.__setattr__(self, "precision", own_where_needed(sections))
        check_recipe(self.precision)
        refuse_sections(sections)
        object.__setattr__(self, "depends_on_meshes", has_rows_with(sections, ("mesh", "context_parallel")))
        object.__setattr__(self, "depends_on_model", has_rows_with(sections, ("model", "adapter")))
        sharding = FSDPPolicy(fsdp=self.fsdp, precision=self.precision, grad_divisor=self.grad_divisor)
        object.__setattr__(self, "sharding", sharding)

    def sections(self, model: nn.Module | None = None, meshes: Meshes | None = None) -> dict[str, Any]:
        """What this policy, a ``model`` and its ``meshes`` say of the sections of a configuration, for the
        table of what goes with what."""
        known: dict[str, Any] = {
            "experts": self.experts, "fsdp": self.fsdp, "memory": self.memory, "precision": self.precision,
        }  # fmt: skip
        if model is not None:
            inner = peel(model)
            is_wrapped = not isinstance(kind_of(inner), NativeKind)
            known["model"] = SimpleNamespace(hf=type(inner).__name__ if is_wrapped else None)
            adapted = [module for module in inner.modules() if has_factors(module)]
            names = sorted({str(m.parameter_name) for m in adapted if hasattr(m, "parameter_name")})
            known["adapter"] = SimpleNamespace(
                rank=int(bool(adapted)),
                kind="dora" if has_magnitudes(inner) else "lora",
                freeze_base=True,
                target_parameters=tuple(names),
                adapts_experts=bool(names),
            )
        if meshes is not None:
            known["mesh"] = meshes.degrees
            known["context_parallel"] = SimpleNamespace(dynamic=False)  # which only a feed knows
        return known

    @classmethod
    def from_config(cls, config: Config) -> ParallelPolicy:
        """The policy of ``train.py``, whose loss is global, and whose feed records and replays."""
        replay = config.experts.replay if config.experts.replay_weights else None
        return cls(
            experts=replace(config.experts, record=None, replay=replay),
            fsdp=config.fsdp,
            precision=own_where_needed(vars(config)),
            memory=config.memory,
            fused_layers=config.train.fused_layers,
            seed=config.train.seed,
            initializer_range=config.model.initializer_range,
            ranges=config.observe.names_ranges,
            grad_divisor=1.0,
            repeats_steps=True,
        )


def parallelize(
    model: Model,
    meshes: Meshes,
    policy: ParallelPolicy | None = None,
    *,
    load: str | os.PathLike[str] | None = None,
    fused_loss: bool = True,
    fused_layers: bool = True,
) -> Model:
    """Split, wrap and shard ``model`` in place, and return it. Collective.

    The model keeps its class, its parameter names and its outputs. Parameters on the meta device are
    initialised shard by shard, as the model itself would, so it may be larger than a rank. Values that ranks
    have filled otherwise (adapters without a seed) become those of the first rank, with a warning.

    Args:
        model: One of fsdmoe's decoders, one of transformers, one of these inside of a ``PeftModel`` (LoRA,
            DoRA), or any other module.
        meshes: From ``build_meshes``.
        policy: Precision, sharding, recomputation and the like. None takes the defaults, with one
            difference: a model that is not fsdmoe's own computes in the dtypes of its own parameters.
        load: A checkpoint, or a Hugging Face folder of safetensors. Each rank reads what it owns.
        fused_loss: A model of transformers that is called with labels in training computes its loss chunk by
            chunk, without logits in its output. False gives logits always.
        fused_layers: Layers of a model that is not fsdmoe's own are computed by fsdmoe's kernels where they
            compute the same; a line in the log says which. False, here or in the policy, leaves them alone.

    Returns:
        ``model`` itself. Its parameters are ``ShardedTensor``s with their global shapes.

    Raises:
        ConfigError: The model is parallel already, or cannot be split over these meshes; the message says
            which part, and what to change.
    """
    refuse_sharded(model)
    refuse_hooked(model)
    kind = kind_of(model)
    is_native = isinstance(kind, NativeKind)
    inner = model if isinstance(model, Decoder) else peel(model)
    dtype_of = kind.dtype_of(None if policy is None else policy.sharding.param_dtype)
    policy = policy or ParallelPolicy()
    sharding = policy.sharding if dtype_of is None else replace(policy.sharding, dtype_of=dtype_of)
    named = {f"policy.{each.name}": repr(getattr(policy, each.name)) for each in fields(policy) if each.init}
    require_alike(named, "give all ranks one policy")
    if policy.depends_on_meshes or (policy.depends_on_model and not is_native):
        refuse_sections(policy.sections(model, meshes))
    before = LostParameters(inner.parameters())
    agree_on_values(inner, meshes.device)  # while it is whole: a split of other values mixes them
    kind.before_split(meshes, fused_layers=fused_layers and policy.fused_layers)
    if meshes.size(Axis.TP) > 1:
        parallelize_tensors(inner, meshes)
    for choice in kind.split_experts(meshes, policy.experts):
        logger.info("experts: dispatcher %s, %s", choice.dispatcher, choice.reason)
    if policy.experts.dispatcher == FlexDispatcher.name:
        _share_buffers(inner, meshes, policy)
    states = [] if policy.precision.recipe == "bf16" else _quantize(model, meshes, policy)
    if policy.precision.frozen_dtype is not None:
        logger.info("precision: %s", keep_frozen_in_codes(inner, policy.precision, meshes))
    if policy.precision.qat is not None:
        logger.info("precision: %s", round_weights(inner, policy.precision, meshes))
    memory = policy.memory
    if memory.keep == "rows":
        _keep_rows(inner)
    small_chunks = bool(memory.recompute or memory.offload) and _keep_less(inner, meshes, memory, kind)
    loading = load is not None
    init_fn = kind.initializer(meshes, seed=policy.seed, std=policy.initializer_range, loading=loading)
    shard_agreed(inner, meshes, sharding, init_fn)
    if policy.precision.recipe != "bf16":
        keep_codes(engine_of(inner))
    if states:
        QuantizedState(states, policy.precision.statistics).follow(inner, meshes)
    if load is not None:
        checkpoints.load(load, inner)
        follow_folder(inner, load)
    before.refuse_in(inner)
    kind.after_sharding(meshes, small_chunks=small_chunks, fused_loss=fused_loss)
    if inner is not model:
        connect_shell(model, inner, meshes)
    if policy.ranges:
        name_ranges(decoder_layers(inner))
    return model


def end_step(model: nn.Module) -> Figures | None:
    """To be called after an optimizer step in a loop of your own that wants ``precision.statistics``, or
    ``experts.balance.bias_rate`` in a wrapped model that is called directly: biases move by the loads of the
    step's forwards. Collective.

    Args:
        model: What ``parallelize`` returned.

    Returns:
        In a step that ``precision.statistics`` asks for, figures of every operand that is quantised, by
        projection; else None.
    """
    if (policies := policies_of(peel(model))) is not None:
        policies.end_step()
    state = state_of(model)
    return None if state is None else state.end_step()


def must_repeat(model: nn.Module, optimizer: Any, figure: float) -> bool:
    """To be called after the backward of a step and before the optimizer, in a loop whose policy says that
    it ``repeats_steps``: with the ``flex`` dispatcher, rows that did not fit into another rank's buffers
    make the loss or the gradient not a number. The step is then to be run once more, on the same
    micro-batches, and this asked again; it takes another way. Collective.

    Args:
        model: What ``parallelize`` returned.
        optimizer: Its gradients are zeroed if so.
        figure: The loss and the gradient norm, added up; the same on all ranks.

    Returns:
        Whether to run the step again.
    """
    state = flex_state_of(model)
    if state is None or not state.must_repeat(math.isfinite(figure)):
        return False
    optimizer.zero_grad()
    if (quantized := state_of(model)) is not None:
        quantized.discard_step()  # it counted what was not a number
    return True


def _refuse_tapes(experts: ExpertsConfig) -> None:
    """ConfigError for folders that only the feed of ``train.py`` opens."""
    key = "record" if experts.record is not None else "replay"
    if experts.record is None and (experts.replay is None or experts.replay_weights):
        return  # a policy replays weights if it says so, from the tape of the call
    tape = "RoutingTape()" if key == "record" else "RoutingTape.load(path)"
    raise ConfigError(
        f"experts.{key}: expected none in a ParallelPolicy, which opens no recording, got "
        f"{getattr(experts, key)}; leave it out and call the model inside of fsdmoe.routing_tape(model, "
        f"fsdmoe.{tape}), or give it to fsdmoe.Feed(meshes, experts=...)"
    )


def flex_state_of(model: nn.Module) -> FlexState | None:
    """What the ``flex`` layers of a model from ``parallelize`` share; None where there are none."""
    return getattr(peel(model), _FLEX, None)


def _share_buffers(model: nn.Module, meshes: Meshes, policy: ParallelPolicy) -> None:
    found = [module if isinstance(module, MoE) else parallel_forward_of(module) for module in model.modules()]
    state = share_state(each.dispatcher for each in found if each is not None)
    if state is not None:
        state.world, state.defers = meshes.group(Axis.WORLD), policy.repeats_steps
        setattr(model, _FLEX, state)


def _quantize(model: nn.Module, meshes: Meshes, policy: ParallelPolicy) -> list[OperandState]:
    """Give the recipe to the layers that it covers; the states of their operands, where they are wanted."""
    precision = own_where_needed(policy.sections(model, meshes))
    check_recipe(precision)
    covered = apply_recipe(model, precision, meshes.facts, keeps_codes=policy.memory.keep == "codes")
    assert covered is not None
    logger.info("precision: %s", covered.line)
    note = REPLACED.get(precision.recipe)
    if note is not None and meshes.rank(Axis.WORLD) == 0:
        logger.warning("precision.recipe: %s", note)
    return covered.states


def _keep_rows(model: nn.Module) -> None:
    """Let experts keep their sorted rows and activations for backward."""
    found = [m if isinstance(m, GroupedExperts) else parallel_forward_of(m) for m in model.modules()]
    owners = [owner for owner in found if owner is not None]
    if not owners:
        raise ConfigError(
            'memory.keep: expected a model with experts for "rows", got none; set memory.keep = "values"'
        )
    for owner in owners:
        owner.policy = owner.policy._replace(keeps_rows=True)


def _keep_less(model: nn.Module, meshes: Meshes, memory: MemoryConfig, kind: ModelKind) -> bool:
    """Let the layers recompute and offload what ``memory`` names; whether the loss wants small chunks too."""
    if memory.is_open:
        raise ConfigError(
            'memory.recompute: expected parts, got "auto", which train.py decides from the shapes of its '
            "batches; name parts, or decide it with fsdmoe.plan.recompute.decide_memory"
        )
    layers = decoder_layers(model)
    kind.prepare_parts(layers, memory)
    keep_less(layers, memory, build_offload(memory, len(layers), meshes.device))
    return memory.wants_small_chunks


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of every outermost module list: the decoder layers."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else decoder_layers(child)
    return found
