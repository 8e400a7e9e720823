"""What can be done with adapters of a sharded model apart from training them: save, load, merge.

``peft``'s own methods stay the way to do it, on all ranks: those that would see one rank's pieces are
replaced on the model at hand. Adapters are added before ``parallelize``, which shards them; later is refused.

=====================================  ======================================================================
``save_pretrained``                    gathers what peft chooses; one rank writes, any ``peft`` loads it
``load_adapter`` of a known name       every rank takes its part of the whole tensors
``merge_and_unload``, ``merge``,       every rank adds its boxes of the product to its piece of the weight
``unmerge``
``disable_adapter``, ``set_adapter``   peft's, but what is trained stays as it was when it was sharded
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

from fsdmoe.checkpoint.agree import together
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.fsdp import ShardedTensor, engine_of
from fsdmoe.huggingface.lora import has_factors, is_transposed
from fsdmoe.huggingface.peft_modules import modules_to_save
from fsdmoe.huggingface.reference import note_reference
from fsdmoe.huggingface.wrapped_experts import stay_on_device
from fsdmoe.mesh import Meshes

_BEFORE = (
    "adapter: expected adapters that were there when fsdmoe.parallelize was called, got new ones ({}), which "
    "no rank would share; add them before, and load weights into them with load_adapter(folder, name)"
)


def connect_shell(shell: nn.Module, inner: nn.Module, meshes: Meshes) -> None:
    """Let a ``PeftModel`` around a sharded model run, move and save it."""
    whole: Any = shell
    # peft calls the inner model's forward directly, past the hooks that gather its weights.
    rewrite(whole.base_model, Rewrite.SHELL, _call_inner)
    whole.save_pretrained = types.MethodType(_save_pretrained, shell)
    whole.add_adapter = functools.partial(_refuse_add, shell)
    stay_on_device(shell, meshes)


def connect_adapters(model: nn.Module) -> None:
    """Replace the methods of peft's layers that would see pieces, or would change what is trained; refuse
    adapters that come later."""
    known = _adapter_names(model)
    frozen: dict[str, list[str]] = {}
    """Parameters that ``set_adapter`` would train and that were frozen when they were sharded, by layer."""
    for name, module in _switched(model):
        layer: Any = module
        if has_factors(module):
            layer.merge = functools.partial(_merge, model, layer)
            layer.unmerge = functools.partial(_unmerge, model, layer)
        if hasattr(layer, "parameter_name"):
            own = layer.unload_and_optionally_merge_module
            layer.unload_and_optionally_merge_module = functools.partial(_unload, layer, own)
        layer.enable_adapters = functools.partial(_enable_adapters, layer)
        layer.set_adapter = functools.partial(_set_adapter, layer, layer.set_adapter, name, frozen)

    def refuse_what_was_not_sharded(module: nn.Module, args: Any) -> None:
        if added := _adapter_names(module) - known:
            raise ConfigError(_BEFORE.format(", ".join(sorted(added))))
        if frozen and module.training and torch.is_grad_enabled():
            first = next(iter(frozen.values()))[0]
            raise ConfigError(
                f"set_adapter: expected adapters that were trained when fsdmoe.parallelize was called, got "
                f"{first}, which was frozen; call set_adapter before parallelize, or to compute with it "
                "alone, set_adapter(..., inference_mode=True) or model.eval()"
            )

    model.register_forward_pre_hook(refuse_what_was_not_sharded, prepend=True)


def _switched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that adapters are switched on and off in."""
    layers = [(name, module) for name, module in model.named_modules() if has_factors(module)]
    return layers + list(modules_to_save(model))


def _enable_adapters(layer: Any, enabled: bool) -> None:
    """peft's, without freezing what is switched off for a while: which parameters are trained was settled
    when they were sharded, and an adapter that does not compute gets no gradient. Merged adapters are taken
    out now: peft does it in forward, where weights are in use."""
    if not enabled and layer.merged_adapters:
        layer.unmerge()
    layer._disable_adapters = not enabled


def _set_adapter(
    layer: Any, own: Any, name: str, frozen: dict[str, list[str]], *args: Any, **kwargs: Any
) -> None:
    """peft's own, without changing what is trained."""
    trained = {n: (p, p.requires_grad) for n, p in layer.named_parameters()}
    own(*args, **kwargs)
    frozen.pop(name, None)
    if wanted := [f"{name}.{n}" for n, (p, before) in trained.items() if p.requires_grad and not before]:
        frozen[name] = wanted
    for parameter, before in trained.values():
        parameter.requires_grad_(before)


def _unload(layer: Any, own: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """peft's own. The experts inside know the adapters around them, and leave them out from now on."""
    experts = own(*args, **kwargs)
    while layer is not experts:
        layer._disable_adapters = True
        layer = layer.base_layer
    return experts


def _call_inner(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    return tuner.model(*args, **kwargs)


def _adapter_names(model: nn.Module) -> set[str]:
    return set(getattr(model, "peft_config", None) or {})


def _refuse_add(shell: Any, adapter_name: str, peft_config: Any, **kwargs: Any) -> None:
    """ConfigError for a new adapter, TRL's copy of the first aside."""
    if not note_reference(shell, adapter_name, peft_config):
        raise ConfigError(_BEFORE.format(adapter_name))


def whole_adapters(model: nn.Module, **chosen: Any) -> dict[str, Tensor]:
    """The whole tensors of everything that peft saves, by name, on the host; ``chosen`` as in its
    ``save_pretrained``. Collective."""
    from fsdmoe.huggingface.peft_api import saved_names  # optional: only where there are adapters

    state = model.state_dict()
    names = saved_names(model, state, **chosen)
    return {
        name: (value.full_tensor() if isinstance(value, ShardedTensor) else value).detach().cpu()
        for name, value in state.items()
        if name in names
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
    chosen = {key: given.arguments[key] for key in ("selected_adapters", "save_embedding_layers")}
    given.arguments["kwargs"]["state_dict"] = whole_adapters(shell, **chosen)
    together(lambda: original(*given.args, **given.kwargs))


# Merging


@torch.no_grad()
def _merge(
    model: nn.Module, layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    wanted = layer.active_adapters if adapter_names is None else adapter_names
    names = [name for name in wanted if name in layer.r and name not in layer.merged_adapters]
    _refuse_several(layer, names)
    for adapter in names:
        _refuse_bias(layer, adapter)
        if safe_merge and not all(factor.isfinite().all() for factor in _factors(layer, adapter)):
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


def _refuse_several(layer: Any, names: list[str]) -> None:
    together = [*layer.merged_adapters, *names]
    if names and len(together) > 1 and any(layer.use_dora.get(name) for name in together):
        raise ConfigError(
            f"merge: expected one adapter, for DoRA changes the whole weight, got {' and '.join(together)}; "
            "name one of them in adapter_names"
        )


def _refuse_bias(layer: Any, adapter: str) -> None:
    if layer.lora_bias.get(adapter) and layer.get_base_layer().bias is None:
        raise ConfigError(
            f"merge: expected layers with a bias for the adapter {adapter}, whose B has one (lora_bias), got "
            f"a {type(layer.get_base_layer()).__name__} without; write the adapter (save_pretrained, "
            "to-adapter) and load it next to the weights"
        )


def _apply(layer: Any, adapter: str, sign: float) -> None:
    """Add the update to the sharded weight, or take it out again."""
    base, scaling = layer.get_base_layer(), layer.scaling[adapter]
    weight: Any = getattr(base, getattr(layer, "parameter_name", "weight"))
    if isinstance(weight, ShardedTensor) and weight.access.is_coded:
        raise ConfigError(
            "merge: expected weights in precision.param_dtype, got frozen ones that are kept in codes "
            "(precision.frozen_dtype), which would round the update; write the adapter (save_pretrained, "
            "to-adapter) and merge it into the weights of the folder (merge-adapter), or parallelize without "
            "frozen_dtype"
        )
    if not isinstance(weight, ShardedTensor):
        raise ConfigError(
            f"merge: expected a sharded weight, between forwards, got a {type(weight).__name__}, which is in "
            "use or quantised; write the adapter (save_pretrained, to-adapter) instead"
        )
    left, right = _factors(layer, adapter)
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


def _factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Two whole matrices, or one for each expert, whose product has the layout of the weight."""
    if adapter in layer.lora_embedding_A:
        pair = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        pair = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a, b = (factor.full_tensor().float() for factor in pair)
    if getattr(layer, "num_experts", 1) == 1:
        return (a.T, b.T) if is_transposed(layer) else (b, a)
    rank = layer.r[adapter]
    a_EQI, b_EOQ = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    if layer._did_swap_in_out_features:
        return b_EOQ, a_EQI
    return a_EQI.transpose(1, 2), b_EOQ.transpose(1, 2)


def _apply_magnitude(layer: Any, adapter: str, weight: ShardedTensor, update: Tensor, sign: float) -> None:
    """DoRA's: each row of the updated weight (each column of a transposed one) gets the length that was
    learnt."""
    over = 0 if is_transposed(layer) else 1
    whole = weight.full_tensor().to(update.dtype)
    magnitude_O = layer.lora_magnitude_vector[adapter].weight.full_tensor().to(update.dtype)
    key = f"{adapter}-weight_norm"
    if sign > 0:
        norm_O = (whole + update).norm(dim=over)
        layer._cache_store(key, norm_O)  # of weights that are gone once they are merged
        weight.copy_(((magnitude_O / norm_O).unsqueeze(over) * (whole + update)).to(weight.dtype))
    else:
        norm_O = layer._cache_pop(key)
        weight.copy_((whole / (magnitude_O / norm_O).unsqueeze(over) - update).to(weight.dtype))
