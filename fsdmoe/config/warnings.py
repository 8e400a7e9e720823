"""What a configuration allows that is probably not meant. A line each; the run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from fsdmoe.checkpoint.hf_held import not_held
from fsdmoe.config.schema import Config, by_dotted_key
from fsdmoe.data.tokenizer import tokenizer_file
from fsdmoe.precision.loss_scale import LossScaleConfig
from fsdmoe.precision.recipes import REPLACED

_GPU_ONLY = {
    "fsdp.cpu_offload": "weights are in host memory anyway",
    "fsdp.register_buffers": "buffers are registered with NCCL, which is for GPUs",
    "data.pin_memory": "memory is page-locked for copies to a GPU",
}
"""Switches that change nothing on a CPU, and why."""

_OF_ADAPTERS = (
    "adapter.alpha",
    "adapter.dropout",
    "adapter.target_modules",
    "adapter.target_parameters",
    "adapter.freeze_base",
)

_READ_WITH: dict[tuple[str, Callable[[Config], bool]], tuple[str, ...]] = {
    ('optim.schedule = "wsd"', lambda config: config.optim.schedule == "wsd"): ("optim.decay_fraction",),
    (
        'optim.schedule = "cosine" or "wsd"',
        lambda config: config.optim.schedule != "constant",
    ): ("optim.min_lr_ratio",),
    ("optim.qk_clip above 0", lambda config: config.optim.qk_clip > 0): ("optim.qk_clip_rows",),
    ("memory.recompute", lambda config: bool(config.memory.recompute)): ("memory.layers",),
    ("memory.offload", lambda config: bool(config.memory.offload)): (
        "memory.offload_keep_last",
        "memory.offload_limit_gib",
    ),
    ("experts.clones above 0", lambda config: config.experts.clones > 0): (
        "experts.clone_rows",
        "experts.clone_keep",
    ),
    ("mesh.ep above 1", lambda config: config.mesh.ep > 1): ("experts.clones",),
    ("experts.balance.device above 0", lambda config: config.experts.balance.device > 0): (
        "experts.balance.device_scope",
    ),
    (
        'experts.selection = "expert_choice"',
        lambda config: config.experts.selection == "expert_choice",
    ): ("experts.expert_choice.factor", "experts.expert_choice.max_experts_per_token"),
    ("context_parallel.dynamic = true", lambda config: config.context_parallel.dynamic): (
        "context_parallel.max_tokens",
    ),
    ("adapter.rank above 0", lambda config: config.adapter.rank > 0): _OF_ADAPTERS,
    (
        "adapter.rank above 0",
        lambda config: config.adapter.rank > 0 or config.adapter.kind == "none",
    ): ("adapter.kind",),
    (
        'adapter.kind = "lora" or "dora"',
        lambda config: config.adapter.kind != "none" or config.adapter.rank == 0,
    ): ("adapter.rank", *_OF_ADAPTERS),
    ('data.kind = "preference"', lambda config: config.data.has_pairs): (
        "preference.loss",
        "preference.beta",
    ),
    ('health.on_spike = "rollback"', lambda config: config.health.on_spike == "rollback"): (
        "health.max_rollbacks",
    ),
    ("model.hf", lambda config: config.model.hf is not None): ("train.fused_layers",),
    ("checkpoint.interval 0 or more", lambda config: config.checkpoint.interval >= 0): (
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "checkpoint.max_failed_saves",
    ),
    (
        'precision.param_dtype = "float16" or precision.reduce_dtype = "float16"',
        lambda config: "float16" in (config.precision.param_dtype, config.precision.reduce_dtype),
    ): tuple(f"precision.loss_scale.{field.name}" for field in dataclasses.fields(LossScaleConfig)),
    ("train.eval_interval 0 or more", lambda config: config.train.eval_interval >= 0): (
        "train.eval_batches",
    ),
}
"""What keys are read with, and how to tell. A key may be in two rows that never warn both."""
_READ_BY_EVALUATION = ("train.eval_batches",)
"""Keys that ``--evaluate-only`` reads in any case."""


def warnings_of(config: Config, *, evaluate_only: bool = False) -> list[str]:
    """Lines that start with the key they are about."""
    return [
        *_tokenizer_warnings(config),
        *_length_warnings(config),
        *_export_warnings(config),
        *_recipe_warnings(config),
        *_unread_warnings(config, read=_READ_BY_EVALUATION if evaluate_only else ()),
    ]


def _tokenizer_warnings(config: Config) -> list[str]:
    """A model was trained with its own tokenizer: the ids of another mean other words to it."""
    folder, name = config.model.hf, config.data.tokenizer
    if folder is None or not tokenizer_file(folder).is_file():
        return []
    own = tokenizer_file(folder)
    if name != "bytes" and tokenizer_file(name).read_bytes() == own.read_bytes():
        return []
    return [
        f"data.tokenizer: {name!r} is not the tokenizer of model.hf, so ids mean other words than the model "
        f"has learnt; drop the key to use {str(own)!r}"
    ]


def _length_warnings(config: Config) -> list[str]:
    """Positions that the model is not meant for; of a Hugging Face folder, its own files say more."""
    model, seq_len = config.model, config.data.seq_len
    if model.hf is not None or seq_len <= model.max_position_embeddings:
        return []
    return [
        f"data.seq_len: rows of {seq_len} tokens are longer than model.max_position_embeddings = "
        f"{model.max_position_embeddings}; raise that, and scale the positions of a model that was trained "
        "on shorter ones with model.rope (docs/long_context.md)"
    ]


def _export_warnings(config: Config) -> list[str]:
    """What to-hf would refuse once the run is over."""
    if config.model.hf is not None:
        return []  # trained as it is
    experts = config.experts
    has_bias = config.model.router_spec().correction_bias or experts.balance.bias_rate > 0
    lines = not_held(dataclasses.asdict(config.model), has_bias=has_bias, selection=experts.selection)
    return [line.replace(": ", ": this run cannot be exported to transformers: ", 1) for line in lines]


def _recipe_warnings(config: Config) -> list[str]:
    """A recipe's name may outlive its kernels."""
    note = REPLACED.get(config.precision.recipe)
    return [] if note is None else [f"precision.recipe: {note}"]


def _unread_warnings(config: Config, *, read: Collection[str] = ()) -> list[str]:
    """Keys with another value than the default that another key switches off, without those that are ``read``
    in any case."""
    values, defaults = (by_dotted_key(dataclasses.asdict(each)) for each in (config, Config()))
    return [
        f"{key}: has no effect without {needed}; set that, or drop the key"
        for (needed, is_read), keys in _READ_WITH.items()
        for key in keys
        if key not in read and values[key] != defaults[key] and not is_read(config)
    ]


def cpu_warnings(config: Config, written: Collection[str]) -> list[str]:
    """The same of what has no effect without a GPU. ``written``: the dotted keys that the user wrote."""
    lines = []
    if config.precision.param_dtype == "bfloat16" and not multiplies_bf16():
        lines.append(
            "precision.param_dtype: products in bfloat16 take some 100 times as long as in float32 on this "
            'CPU, which has no instructions for them; set precision.param_dtype = "float32"'
        )
    for key, why in _GPU_ONLY.items():
        section, _, name = key.partition(".")
        if key in written and getattr(getattr(config, section), name):
            lines.append(f"{key}: saves nothing, since there is no GPU here ({why}); drop it")
    return lines


def multiplies_bf16() -> bool:
    """Whether oneDNN computes products in bfloat16 on this CPU, which torch asks before each of them; where
    it does not, a plain loop does. True where torch has no oneDNN to ask."""
    import torch  # not above: configurations are checked before it is loaded

    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is None or bool(is_supported())
