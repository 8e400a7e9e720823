"""Which weights of a model are rounded for quantisation-aware training (``precision.qat``), and asking for
it: experts, and what else of :mod:`fsdmoe.parallel.quantized_layers` ``precision.qat_modules`` names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fsdmoe.checkpoint.disk_names import disk_names
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Coordinates
from fsdmoe.huggingface.adapters import ExpertsSpec
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.mesh import Axis
from fsdmoe.parallel.quantized_layers import part_of
from fsdmoe.precision.config import PrecisionConfig, torch_dtype
from fsdmoe.precision.deployed_formats import BLOCKS, WeightRounding, round_for_products
from fsdmoe.precision.formats import DeployedFormat


def round_weights(
    model: nn.Module,
    precision: PrecisionConfig,
    at: Coordinates,
    experts: Mapping[str, ExpertsSpec] | None = None,
) -> str | None:
    """Ask for the rounding of every weight that ``precision.qat_modules`` names; says how many, None without
    ``precision.qat``. ``experts``: those of a model that is only planned, by name."""
    kind = precision.qat
    if kind is None:
        return None
    if any(at.size(axis) > 1 for axis in (Axis.TP, Axis.ETP)):
        raise AssertionError("qat with tp or etp, which fsdmoe.config.compatibility refuses")
    unused = set(precision.qat_modules)
    known: list[str] = []
    weights: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        forward = parallel_forward_of(module)
        spec = forward.spec if forward is not None else (experts or {}).get(name)
        if spec is None and part_of(name, module) is None:
            continue
        known.append(name)
        matching = {pattern for pattern in precision.qat_modules if fnmatchcase(name, pattern)}
        unused -= matching
        if matching:
            is_transposed = spec is not None and spec.transposed
            rounding = WeightRounding(kind, torch_dtype(precision.param_dtype), is_transposed)
            weights |= _mark(name, module, rounding)
    if unused:
        raise ConfigError(
            f"precision.qat_modules: expected patterns of experts or projections, got {sorted(unused)[0]!r}, "
            f"which no such module has as its name; names are whole ({', '.join(known[:3]) or 'none here'}), "
            "so begin with *."
        )
    _refuse_unwritable(getattr(model, "config", None), weights, kind)
    return f"{len(weights)} weights are rounded to {kind} wherever they are gathered"


def _mark(name: str, module: nn.Module, rounding: WeightRounding) -> dict[str, tuple[int, ...]]:
    """Its weights, with their shapes."""
    size = BLOCKS[rounding.format] or 1
    num_dims = 2 if isinstance(module, nn.Linear) else 3  # less: a bias
    weights = {key: p for key, p in module.named_parameters(recurse=False) if p.dim() == num_dims}
    for key, parameter in weights.items():
        width = parameter.shape[-2 if rounding.transposed else -1]
        if width % size:
            raise ConfigError(
                f"precision.qat: expected inputs in multiples of {size}, which share a scale in "
                f"{rounding.format}, got {width} of {name}.{key}; choose another format, or leave it out of "
                "precision.qat_modules"
            )
        round_for_products(module, key, rounding)
    return {f"{name}.{key}": tuple(parameter.shape) for key, parameter in weights.items()}


def _refuse_unwritable(config: Any, weights: Mapping[str, tuple[int, ...]], kind: DeployedFormat) -> None:
    """Refuse what no folder holds in this format: it has a layout for matrices and, in mxfp4, for the experts
    of gpt-oss, which are all in one tensor."""
    is_native = hasattr(config, "architecture")
    fields = {"model_type": config.architecture} if is_native else getattr(config, "to_dict", dict)()
    try:
        names = disk_names(fields, native=is_native)
    except CheckpointError:
        return  # such a model cannot be exported at all, which is no matter of its format
    is_gpt_oss = fields["model_type"] == "gpt_oss"
    for name, shape in weights.items():
        is_matrix = len(names.to_disk(name, shape)[0].disk_shape) == 2
        if is_matrix == is_gpt_oss or (is_gpt_oss and kind != "mxfp4"):
            held = 'experts in "mxfp4" and nothing else' if is_gpt_oss else "matrices"
            raise ConfigError(
                f"precision.qat: expected weights that a folder of {fields['model_type']} holds quantised "
                f'({held}), got {name} in "{kind}"; choose another format, or leave it out of '
                "precision.qat_modules"
            )
