"""What can be done with adapters of a sharded model beside training them: save, load, merge.

``peft``'s own methods stay the way to do it, on all ranks: those that would see one rank's pieces are
replaced on the model at hand. Adapters are added before ``parallelize``, which shards them; later is refused.

=====================================  ======================================================================
``save_pretrained``                    gathers the adapters, one rank writes; any ``peft`` loads the folder
``load_adapter`` of a known name       every rank takes its part of the whole tensors
``merge_and_unload``, ``merge``,       every rank adds its boxes of the product to its piece of the weight
``unmerge``
``get_peft_model_state_dict``          peft's own: sharded tensors, ``full_tensor()`` of each is the whole
=====================================  ======================================================================
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.checkpoint.adapter_names import is_adapter_name
from fsdmoe.checkpoint.agree import together
from fsdmoe.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor, engine_of
from fsdmoe.huggingface.lora import has_factors, magnitudes
from fsdmoe.huggingface.wrapped_experts import stay_on_device
from fsdmoe.mesh import Meshes

_BEFORE = (
    "adapter: expected adapters that were there when fsdmoe.parallelize was called, got new ones ({}), which "
    "no rank would share; add them before, and load weights into them with load_adapter(folder, name)"
)


def connect_shell(shell: nn.Module, inner: nn.Module, meshes: Meshes) -> None:
    """Let a ``PeftModel`` around a sharded model run, move and save it; nothing where they are the same."""
    if shell is inner:
        return
    whole: Any = shell
    # peft calls the inner model's forward directly, past the hooks that gather its weights.
    whole.base_model.forward = types.MethodType(_call_inner, whole.base_model)
    whole.save_pretrained = types.MethodType(_save_pretrained, shell)
    whole.add_adapter = _refuse_add
    stay_on_device(shell, meshes)


def connect_adapters(model: nn.Module) -> None:
    """Replace the methods of peft's layers that would see pieces; refuse adapters that come later."""
    for module in model.modules():
        if has_factors(module):
            layer: Any = module
            layer.merge = functools.partial(_merge, model, layer)
            layer.unmerge = functools.partial(_unmerge, model, layer)
            layer.enable_adapters = functools.partial(_enable_adapters, layer)
    known = _adapter_names(model)

    def refuse_new_adapters(module: nn.Module, args: Any) -> None:
        if added := _adapter_names(module) - known:
            raise ConfigError(_BEFORE.format(", ".join(sorted(added))))

    model.register_forward_pre_hook(refuse_new_adapters, prepend=True)


def _enable_adapters(layer: Any, enabled: bool) -> None:
    """peft's, without freezing what is switched off for a while: which parameters are trained was settled
    when they were sharded, and an adapter that does not compute gets no gradient."""
    layer._disable_adapters = not enabled


def _call_inner(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    return tuner.model(*args, **kwargs)


def _adapter_names(model: nn.Module) -> set[str]:
    return set(getattr(model, "peft_config", None) or {})


def _refuse_add(adapter_name: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(_BEFORE.format(adapter_name))


def whole_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The whole tensors of everything that is trained or belongs to an adapter, by name, on the host.
    Collective."""
    return {
        name: value.detach().cpu()
        for name, parameter in model.named_parameters()
        if is_adapter_name(name) or parameter.requires_grad or ".modules_to_save." in name
        for value in [parameter.full_tensor() if isinstance(parameter, ShardedTensor) else parameter]
    }


def _save_pretrained(shell: Any, *args: Any, **kwargs: Any) -> None:
    """peft's, of tensors that are gathered on all ranks and written by the first. Whole tensors that the
    caller gathered are written where it is called, perhaps on one rank alone."""
    original = functools.partial(type(shell).save_pretrained, shell)
    if kwargs.get("state_dict") is not None:
        original(*args, **kwargs)
        return
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    given.arguments["is_main_process"] &= dist.get_rank() == 0
    given.arguments["kwargs"]["state_dict"] = whole_adapters(shell)
    together(lambda: original(*given.args, **given.kwargs))


# Merging


@torch.no_grad()
def _merge(
    model: nn.Module, layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    names = layer.active_adapters if adapter_names is None else adapter_names
    for adapter in names:
        if adapter not in layer.lora_A or adapter in layer.merged_adapters:
            continue
        _refuse_several(layer, adapter)
        if safe_merge and not _is_finite(layer, adapter):
            raise ValueError(f"the adapter {adapter} is not finite; the weights were not changed")
        _apply(layer, adapter, 1.0)
        layer.merged_adapters.append(adapter)
    engine_of(model).mark_changed()


@torch.no_grad()
def _unmerge(model: nn.Module, layer: Any) -> None:
    while layer.merged_adapters:
        _apply(layer, layer.merged_adapters[-1], -1.0)
        layer.merged_adapters.pop()  # last: what could not be taken out is still merged
    engine_of(model).mark_changed()


def _refuse_several(layer: Any, adapter: str) -> None:
    if layer.merged_adapters and (magnitudes(layer) or layer.use_dora.get(adapter)):
        raise ConfigError(
            f"merge: expected one adapter, for DoRA changes the whole weight, got {adapter} after "
            f"{layer.merged_adapters}; merge one of them"
        )


def _is_finite(layer: Any, adapter: str) -> bool:
    factors = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
    return all(bool(factor.full_tensor().isfinite().all()) for factor in factors)


def _apply(layer: Any, adapter: str, sign: float) -> None:
    """Add the update to the sharded weight, or take it out again."""
    base, scaling = layer.get_base_layer(), layer.scaling[adapter]
    weight: Any = getattr(base, getattr(layer, "parameter_name", "weight"))
    if isinstance(weight, ShardedTensor) and weight.access.is_coded:
        raise ConfigError(
            "merge: expected weights in precision.param_dtype, got frozen ones that are kept in fp8 "
            "(precision.frozen_dtype), which would round the update; write the adapter (save_pretrained, "
            "to-adapter) and merge it into the weights of the folder, or parallelize without frozen_dtype"
        )
    if not isinstance(weight, ShardedTensor):
        raise ConfigError(
            "merge: expected to be called between forwards, got a weight that is in use (disable_adapter "
            "takes merged adapters out in forward); call unmerge_adapter() before"
        )
    left, right = _factors(layer, adapter, weight.dim())
    if layer.use_dora.get(adapter):
        _apply_magnitude(layer, adapter, weight, scaling * left @ right, sign)
    else:
        for box in weight.boxes:
            *batch, rows, columns = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            product = left[(*batch, rows)] @ right[(*batch, slice(None), columns)]
            view = box.view_of(weight.piece)
            view += (sign * scaling * product).to(view.dtype)
    if layer.lora_bias.get(adapter):
        bias = scaling * layer.lora_B[adapter].bias.full_tensor()
        base.bias.copy_(base.bias.full_tensor() + sign * bias)


def _factors(layer: Any, adapter: str, num_dims: int) -> tuple[Tensor, Tensor]:
    """Two whole matrices, or one for each expert, whose product has the layout of the weight."""
    a, b = (factors[adapter].weight.full_tensor().float() for factors in (layer.lora_A, layer.lora_B))
    if num_dims == 2:
        return b, a
    rank = layer.r[adapter]
    a_EQI, b_EOQ = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    if layer._did_swap_in_out_features:
        return b_EOQ, a_EQI
    return a_EQI.transpose(1, 2), b_EOQ.transpose(1, 2)


def _apply_magnitude(layer: Any, adapter: str, weight: ShardedTensor, update_OI: Tensor, sign: float) -> None:
    """DoRA's: each row of the updated weight gets the length that was learnt."""
    whole_OI = weight.full_tensor().to(update_OI.dtype)
    magnitude_O = layer.lora_magnitude_vector[adapter].weight.full_tensor().to(update_OI.dtype)
    key = f"{adapter}-weight_norm"
    if sign > 0:
        norm_O = (whole_OI + update_OI).norm(dim=1)
        layer._cache_store(key, norm_O)  # of weights that are gone once they are merged
        weight.copy_(((magnitude_O / norm_O)[:, None] * (whole_OI + update_OI)).to(weight.dtype))
    else:
        norm_O = layer._cache_pop(key)
        weight.copy_((whole_OI / (magnitude_O / norm_O)[:, None] - update_OI).to(weight.dtype))
