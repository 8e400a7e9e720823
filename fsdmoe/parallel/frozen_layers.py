"""Which frozen weights of a model are kept as codes (``precision.frozen_dtype``), and asking for it.

Those that a recipe could cover (:mod:`fsdmoe.parallel.quantized_layers`): projections of attention, of MLPs
and of experts, in all decoder layers. Layers that one covers multiply by the codes; others decode them.
Routers, norms, embedding and head stay in ``param_dtype``, as do experts that are re-ordered for the kernels,
and weights whose rows are no whole blocks of four-bit codes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Coordinates, computes_on_dtensor
from fsdmoe.core.rewrites import Rewrite
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.huggingface.lora import has_factors, magnitudes
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.mesh import Axis
from fsdmoe.parallel.quantized_layers import give_forward, part_of
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.four_bit import FourBit
from fsdmoe.precision.quantized_weight import WeightCoding, quantize_for_gather

FROZEN = Scaling(E4M3, (128, 128))


def coding_of(precision: PrecisionConfig) -> WeightCoding:
    """How frozen weights are kept."""
    if precision.frozen_dtype in ("nf4", "int4"):
        return WeightCoding(FourBit(precision.frozen_dtype, precision.four_bit_block))
    recipe = precision.build_recipe()
    scaling = None if recipe is None else recipe.gather_scaling
    return WeightCoding(scaling or FROZEN)


def keep_frozen_in_codes(
    model: nn.Module,
    precision: PrecisionConfig,
    at: Coordinates,
    experts: Mapping[str, ExpertsSpec] | None = None,
) -> str | None:
    """Ask for shards of codes of every frozen matrix; says how many, None without ``frozen_dtype``.
    ``experts``: those of a model that is only planned, by name."""
    if precision.frozen_dtype is None:
        return None
    if any(at.size(axis) > 1 for axis in (Axis.TP, Axis.ETP)) or has_magnitudes(model):
        raise AssertionError("frozen_dtype with tp, etp or DoRA, which fsdmoe.config.compatibility refuses")
    num_marked = 0
    coding = coding_of(precision)
    for name, module in model.named_modules():
        spec = (experts or {}).get(name)
        forward = parallel_forward_of(module)
        spec = forward.spec if forward is not None else spec
        is_experts = spec is not None or isinstance(module, GroupedExperts)
        if not is_experts and part_of(name, module) is None:
            continue
        if spec is not None and spec.is_reordered:
            continue
        marked = _mark(name, module, 3 if is_experts else 2, coding)
        num_marked += marked
        owner = module if isinstance(module, GroupedExperts) else forward
        if marked and owner is not None:
            owner.policy = owner.policy._replace(coded=True)
    if not num_marked:
        raise ConfigError(
            "precision.frozen_dtype: expected frozen projections in the decoder layers (with rows of whole "
            "blocks of precision.frozen_block elements), got none; freeze the model's own weights "
            "(adapter.rank does, with adapter.freeze_base = true), or drop it"
        )
    block = coding.scaling.block if isinstance(coding.scaling, FourBit) else "128 x 128"
    return f"{num_marked} frozen weights are kept in {precision.frozen_dtype}, in blocks of {block}"


def _mark(name: str, module: nn.Module, num_dims: int, coding: WeightCoding) -> int:
    block = coding.scaling.block if isinstance(coding.scaling, FourBit) else 1
    own = module.named_parameters(recurse=False)
    frozen = {
        key: p for key, p in own if p.dim() == num_dims and not p.requires_grad and p.shape[-1] % block == 0
    }
    for key, parameter in frozen.items():
        if computes_on_dtensor(parameter):
            raise ConfigError(
                f"precision.frozen_dtype: {name} computes on DTensors, whose products are torch's; leave the "
                "model whole and let fsdmoe.parallelize split it"
            )
        quantize_for_gather(module, key, coding)
    if frozen and type(module) is nn.Linear:
        give_forward(name, module, Rewrite.FROZEN, "precision.frozen_dtype")
    return len(frozen)


def has_magnitudes(model: nn.Module) -> bool:
    """Whether the model has adapters of DoRA."""
    return any(has_factors(module) and magnitudes(module) for module in model.modules())
