"""Hugging Face models from their folders. Imports transformers; only the names of weights on disk
(:mod:`fsdmoe.checkpoint.hf_table`) need it elsewhere.

Wrapping a model needs nothing of this: :func:`fsdmoe.parallelize` takes any module as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdmoe.context_parallel.config import Mode
from fsdmoe.core.capturing import DeviceOnly
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import choice_like
from fsdmoe.huggingface.attention import huggingface_attention
from fsdmoe.huggingface.for_a_while import set_for_a_while

try:
    import transformers
    from transformers import masking_utils
except ImportError as error:
    raise ImportError("transformers is needed for Hugging Face models: pip install 'fsdmoe[hf]'") from error

_LONE = "fsdmoe_lone"


def read_hf_config(path: str | os.PathLike[str]) -> Any:
    """The configuration in ``path/config.json``, with the defaults of its model type filled in."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        name = os.fspath(path)
        raise ConfigError(
            f"model.hf: expected a folder with a config.json, got {name!r}; {_folder_instead(folder, name)}"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"model.hf: {os.fspath(path)!r} has a config.json that transformers {transformers.__version__} "
            f"cannot read ({str(error).splitlines()[0]}); fix it, or install the version that it needs"
        ) from error


def read_generation_config(folder: Path) -> Any:
    """What the folder's ``generation_config.json`` says; None without the file."""
    has_file = (folder / transformers.utils.GENERATION_CONFIG_NAME).is_file()
    return transformers.GenerationConfig.from_pretrained(folder) if has_file else None


def changed_generation(own: Any, config: Any) -> dict[str, Any]:
    """Of a generation config that was made from ``config``: what was set in it since."""
    made = transformers.GenerationConfig.from_model_config(config).to_dict()
    return {key: getattr(own, key) for key, value in own.to_dict().items() if value != made.get(key)}


def _folder_instead(folder: Path, name: str) -> str:
    """A folder of nearly this name, or where to get it."""
    if close := choice_like(str(folder), [str(each.parent) for each in folder.parent.glob("*/config.json")]):
        return close
    if name.count("/") == 1 and not folder.exists() and name[0] not in "./~":
        return f"hf download {name} --local-dir {folder.name}, and name that folder"
    return "name one"


def build_hf_model(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> nn.Module:
    """The causal language model that ``path/config.json`` describes, on the meta device: no memory yet.

    ``dtype`` of its parameters; None takes the configuration's own."""
    config = read_hf_config(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
    return model.train()


def use_planned_attention(model: nn.Module, mode: Mode) -> None:
    """Let the model's attention follow the plan that comes with each call (``attention_plan=``), across ranks
    where the plan has several. transformers then builds no masks."""
    name = f"fsdmoe_{mode}"
    if _attention_of(model) == name:
        return
    if not _is_planned(model):
        model.unplanned_attention = _attention_of(model)  # type: ignore[assignment]
    transformers.AttentionInterface.register(name, huggingface_attention(mode))
    set_implementation = getattr(model, "set_attn_implementation", None)
    if set_implementation is not None:
        set_implementation(name)
    if _attention_of(model) != name:
        raise ConfigError(
            f"mesh.cp: {type(model).__name__} does not attend through transformers' attention interface, so "
            "its sequences cannot be split over ranks; set mesh.cp and mesh.tp to 1"
        )


def use_own_attention(model: nn.Module) -> None:
    """Undo :func:`use_planned_attention`."""
    if _is_planned(model):
        model.set_attn_implementation(model.unplanned_attention)  # type: ignore[operator]


def unplanned_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let the model attend as it did before any plan, to whole rows and through its cache, for a while."""
    return _attending_by(model, model.unplanned_attention) if _is_planned(model) else contextlib.nullcontext()


@contextlib.contextmanager
def _attending_by(model: nn.Module, name: Any) -> Iterator[None]:
    own = _attention_of(model)
    model.set_attn_implementation(name)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(own)  # type: ignore[operator]


def _is_planned(model: nn.Module) -> bool:
    return (_attention_of(model) or "").startswith("fsdmoe_")


def _attention_of(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def lone_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let every token attend to itself alone, for a while: what else passes from one to another shows."""
    transformers.AttentionInterface.register(_LONE, _attend_alone)
    return _attending_by(model, _LONE)


def _attend_alone(
    module: nn.Module,
    query_BHLD: torch.Tensor,
    key: torch.Tensor,
    value_BGLE: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    value_BHLE = value_BGLE.repeat_interleave(query_BHLD.shape[1] // value_BGLE.shape[1], 1)
    return value_BHLE.transpose(1, 2).contiguous(), None


def short_chunks(model: nn.Module, size: int | None) -> contextlib.AbstractContextManager[None]:
    """Let masks of chunked attention have chunks of ``size`` tokens, for a while; None: as they are."""
    if size is None:
        return contextlib.nullcontext()
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    return set_for_a_while(config, "attention_chunk_size", size)


@contextlib.contextmanager
def capturable_masks(*, packed: bool) -> Iterator[None]:
    """Inside of a CUDA graph's capture: the masks that transformers makes outside of one. There it reads from
    the device whether rows are packed, which the caller knows; while it traces it masks in any case. Other
    calls that go through the host stay on the device."""
    names = ("find_packed_sequence_indices", "is_tracing")
    originals = {name: getattr(masking_utils, name) for name in names if hasattr(masking_utils, name)}

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1) if packed else None

    masking_utils.find_packed_sequence_indices = find
    masking_utils.is_tracing = lambda *_: False
    try:
        with DeviceOnly():
            yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def mask_documents(model: nn.Module) -> RemovableHandle:
    """Give a model that would not look at positions itself (gpt-oss) masks that are made from them, by kind
    of layer, as such models take them; until what is returned is removed."""
    config: Any = model.config

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None or kwargs.get("use_cache"):
            return None
        embedding = module.get_input_embeddings().weight  # type: ignore[operator]
        return args, kwargs | {"attention_mask": _document_masks(config, positions, embedding.dtype)}

    return model.base_model.register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[union-attr]


def _document_masks(config: Any, positions_BS: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    size = (*positions_BS.shape, 1)
    given = {
        "config": config,
        "inputs_embeds": torch.empty(size, dtype=dtype, device=positions_BS.device),
        "attention_mask": None,
        "cache_position": torch.arange(size[1], device=positions_BS.device),
        "past_key_values": None,
        "position_ids": positions_BS,
    }
    makers = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }
    return {
        kind: make(**{key: given[key] for key in inspect.signature(make).parameters if key in given})
        for kind, make in makers.items()
        if kind in config.layer_types
    }
