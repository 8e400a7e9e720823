"""Which of peft's modules are known here, and a refusal by name of all others, before anything is split.

peft has dozens of ways to adapt a model, and more with each release. Most would train in a sharded model up
to the place where they read a weight that is not gathered, or would be left out of what is merged and
exported. So the known ones are listed, and whatever else of peft is in a model is refused:

========================  ===============================================================================
``lora.layer.Linear``     LoRA or DoRA around a linear layer, or around ``Conv1D``, whose weight is transposed
``lora.layer.Embedding``  LoRA or DoRA around an embedding
``TorchaoLoraLinear``     LoRA around a layer that torchao quantised; not merged
``lora.ParamWrapper``     LoRA of a weight of fused experts (``target_parameters``)
``ModulesToSaveWrapper``  a copy of a module that is trained as a whole (``modules_to_save``)
========================  ===============================================================================

peft is recognised by where its classes are from: it need not be installed, and is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdmoe.core.errors import ConfigError

_LORA = "peft.tuners.lora"
_KNOWN = frozenset(
    {
        f"{_LORA}.layer.Linear",
        f"{_LORA}.layer.Embedding",
        f"{_LORA}.layer.ParamWrapper",
        f"{_LORA}.torchao.TorchaoLoraLinear",
        f"{_LORA}.dora.DoraLinearLayer",
        f"{_LORA}.dora.DoraEmbeddingLayer",
        "peft.utils.other.ModulesToSaveWrapper",
    }
)
_VARIANTS = frozenset({"DoraLinearVariant", "DoraEmbeddingVariant"})
_EXPECTED = (
    "expected LoRA or DoRA (peft.LoraConfig) on linear layers, Conv1D, embeddings and fused experts, or "
    "modules_to_save"
)


def refuse_unknown_adapters(model: nn.Module) -> None:
    """ConfigError for whatever peft put into ``model`` and is not known here."""
    for name, module in model.named_modules():
        kind = _kind_of_peft(module)
        if kind is None:
            continue
        if kind not in _KNOWN:
            found = f"{_described(kind, module)} at {name or 'the model itself'}"
            raise ConfigError(
                f"adapter: {_EXPECTED}, got {found}; choose one of these, or train without fsdmoe.parallelize"
            )
        for adapter, variant in getattr(module, "lora_variant", {}).items():
            if type(variant).__name__ not in _VARIANTS:
                raise ConfigError(
                    f"adapter: {_EXPECTED}, got the variant {type(variant).__name__} of LoRA in the adapter "
                    f"{adapter} at {name}; leave its key out of the LoraConfig"
                )
    _refuse_shared_memory(model)


def refuse_adapters(model: nn.Module) -> None:
    """ConfigError for anything of peft in one of fsdmoe's own decoders."""
    for name, module in model.named_modules():
        if _kind_of_peft(module) is not None:
            raise ConfigError(
                f"adapter: expected a model of transformers, got {name} around a part of a "
                f"{type(model).__name__} of fsdmoe, which has no adapters; load its weights with model.hf"
            )


def modules_to_save(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of which peft trains a copy, with its name."""
    for name, module in model.named_modules():
        if _kind_of_peft(module) == "peft.utils.other.ModulesToSaveWrapper":
            yield name, module


def _kind_of_peft(module: nn.Module) -> str | None:
    """The full name of the class of a module of peft, or of one that is derived from such; else None."""
    kind = type(module)
    if not any(each.__module__.startswith("peft.") for each in kind.__mro__):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(kind: str, module: nn.Module) -> str:
    """peft's name for what a module belongs to."""
    if kind.endswith(".TrainableTokensWrapper"):
        return f"trainable_token_indices ({kind})"
    if configs := getattr(module, "peft_config", None):  # a whole model
        return f"{', '.join(sorted({config.peft_type.value for config in configs.values()}))} ({kind})"
    path = kind.split(".")
    return f"{path[2].upper()} ({kind})" if path[:2] == ["peft", "tuners"] else kind


def _refuse_shared_memory(model: nn.Module) -> None:
    """Adapters that peft ties (``ensure_weight_tying``) are two parameters of one memory, which sharding
    would part."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta or type(parameter) is not nn.Parameter:
            continue
        memory = parameter.data_ptr()
        if first.setdefault(memory, name) != name:
            raise ConfigError(
                f"parallelize: expected parameters with memory of their own, got {name} in the memory of "
                f"{first[memory]} (as ensure_weight_tying does to adapters); register one parameter in both "
                "places, or leave that key out of the LoraConfig"
            )
