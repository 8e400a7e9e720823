"""What somebody meant who wrote a key that there is not: names of other tools, slips, keys of another
section."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fsdmoe.config.keys import all_keys
from fsdmoe.config.schema import SECTIONS
from fsdmoe.rules import nearest

WITH_VALUE = ("--config", "--run", "--resume", "--world", "--gpu")
BARE = ("--print-config", "--dry-run", "--evaluate-only", "--files-elsewhere", "--take-over", "--check-only")
FLAGS = (*WITH_VALUE, *BARE, "--help")
"""Options without a section."""

_PARAM_DTYPE = "precision.param_dtype"
_MOMENTUM = "optim.beta1"
_ACCUMULATED = (
    "train.global_batch_size (rows a step: train.micro_batch_size x data-parallel ranks x accumulated "
    "micro-batches)"
)
_WANDB = 'observe.project (with observe.loggers = ["wandb"])'
_NO_PIPELINE = "there is no pipeline parallelism; raise mesh.ep, mesh.tp or mesh.cp instead"
ALIASES = {
    # Hugging Face, torchtitan, Megatron, nanoGPT and what people say.
    "top_k": "model.num_experts_per_tok", "topk": "model.num_experts_per_tok",
    "moe_router_topk": "model.num_experts_per_tok", "experts_per_token": "model.num_experts_per_tok",
    "n_experts": "model.num_experts", "num_local_experts": "model.num_experts",
    "n_routed_experts": "model.num_experts",
    "n_layers": "model.num_hidden_layers", "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers", "depth": "model.num_hidden_layers",
    "d_model": "model.hidden_size", "dim": "model.hidden_size", "n_embd": "model.hidden_size",
    "n_heads": "model.num_attention_heads", "n_head": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads", "n_kv_heads": "model.num_key_value_heads",
    "ffn_hidden_size": "model.intermediate_size", "d_ff": "model.intermediate_size",
    "model_name_or_path": "model.hf", "model_path": "model.hf", "hf_path": "model.hf",
    "lr": "optim.lr", "learning_rate": "optim.lr", "max_lr": "optim.lr", "min_lr": "optim.min_lr_ratio",
    "wd": "optim.weight_decay", "betas": f"{_MOMENTUM} and optim.beta2", "momentum": _MOMENTUM,
    "optimizer": "optim.name", "lr_scheduler_type": "optim.schedule", "scheduler": "optim.schedule",
    "warmup": "optim.warmup_steps", "lr_warmup_iters": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps (a number of steps)",
    "max_grad_norm": "optim.grad_clip", "clip_grad": "optim.grad_clip", "max_norm": "optim.grad_clip",
    "dtype": _PARAM_DTYPE, "torch_dtype": _PARAM_DTYPE, "mixed_precision": _PARAM_DTYPE,
    "precision": _PARAM_DTYPE, "bf16": f'{_PARAM_DTYPE} = "bfloat16"', "fp16": f'{_PARAM_DTYPE} = "float16"',
    "fp32": f'{_PARAM_DTYPE} = "float32"', "fp8": 'precision.recipe = "fp8_blockwise"',
    "dp": "mesh.dp_shard", "data_parallel": "mesh.dp_shard", "data_parallel_size": "mesh.dp_shard",
    "data_parallel_shard_degree": "mesh.dp_shard", "data_parallel_replicate_degree": "mesh.dp_outer",
    "expert_parallel": "mesh.ep", "expert_parallel_size": "mesh.ep", "expert_model_parallel_size": "mesh.ep",
    "expert_parallel_degree": "mesh.ep", "tensor_parallel": "mesh.tp", "tensor_parallel_size": "mesh.tp",
    "tensor_model_parallel_size": "mesh.tp", "tensor_parallel_degree": "mesh.tp",
    "context_parallel_size": "mesh.cp", "context_parallel_degree": "mesh.cp",
    "batch_size": "train.global_batch_size", "local_batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size", "bs": "train.global_batch_size",
    "gradient_accumulation_steps": _ACCUMULATED,
    "grad_accum": _ACCUMULATED,
    "max_steps": "train.steps", "train_iters": "train.steps", "max_iters": "train.steps",
    "epochs": "train.steps (a run is counted in steps)", "iterations": "train.steps",
    "num_train_epochs": "train.steps (a run is counted in steps)",
    "num_epochs": "train.steps (a run is counted in steps)",
    "out_dir": "train.output_dir", "save_dir": "train.output_dir", "eval_iters": "train.eval_batches",
    "eval_steps": "train.eval_interval", "compile": "train.kernels (fused kernels are built in)",
    "max_length": "data.seq_len", "max_seq_len": "data.seq_len", "max_seq_length": "data.seq_len",
    "seq_length": "data.seq_len", "sequence_length": "data.seq_len", "block_size": "data.seq_len",
    "context_length": "data.seq_len", "dataset": "data.path", "data_path": "data.path",
    "dataset_path": "data.path", "tokenizer_path": "data.tokenizer", "packing": "data.pack",
    "text_field": "data.field", "val_split": "data.holdout", "split": "data.holdout",
    "save_interval": "checkpoint.interval", "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_last", "load_path": "checkpoint.load",
    "resume_from": "checkpoint.load", "init_from": "checkpoint.load",
    "gradient_checkpointing": 'memory.recompute = ["layer"]', "checkpointing": 'memory.recompute = ["layer"]',
    "activation_checkpointing": 'memory.recompute = ["layer"]', "recompute": "memory.recompute",
    "offload": "fsdp.cpu_offload", "zero_stage": "fsdp.shard", "sharding_strategy": "fsdp.shard",
    "logging_steps": "observe.log_interval", "log_freq": "observe.log_interval",
    "wandb_project": _WANDB, "project": _WANDB, "wandb": 'observe.loggers = ["wandb"]',
    "report_to": "observe.loggers", "mlflow": 'observe.loggers = ["mlflow"]',
    "lora_rank": "adapter.rank", "lora_r": "adapter.rank", "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout", "lora.r": "adapter.rank", "lora.rank": "adapter.rank",
    "adapter.r": "adapter.rank", "aux_loss_coef": "experts.balance.sequence",
    "router_aux_loss_coef": "experts.balance.sequence", "capacity_factor": "experts.capacity.factor",
    "resume_from_checkpoint": "checkpoint.load (or --resume with the folder of a run)", "conf": "--config",
    "base_model": "model.hf", "sequence_len": "data.seq_len", "stage": "fsdp.shard",
    "memory.mode": 'memory.recompute = ["layer"]',
    "cfg": "--config", "config_file": "--config", "eval_only": "--evaluate-only",
    "dryrun": "--dry-run", "world_size": "--world", "h": "--help",
}  # fmt: skip
"""Keys and options by the names that they have elsewhere."""

_SECTIONS = {
    "training": "train", "trainer": "train", "optimizer": "optim", "parallel": "mesh",
    "parallelism": "mesh", "lora": "adapter", "peft": "adapter", "dataset": "data", "moe": "experts",
    "metrics": "observe", "logging": "observe",
}  # fmt: skip
_SECTION_KEYS = {
    "activation_checkpoint": 'memory.recompute = ["layer"]',
    "zero_optimization": 'fsdp.shard = "params", "grads" or "optimizer" (ZeRO 3, 2, 1)',
}
"""Tables of other tools that a key stands for here."""
_ABSENT = {
    "pp": _NO_PIPELINE, "pipeline_parallel": _NO_PIPELINE, "pipeline_parallel_size": _NO_PIPELINE,
    "pipeline_model_parallel_size": _NO_PIPELINE, "pipeline_parallel_degree": _NO_PIPELINE,
    "deepspeed": "no file of DeepSpeed is read; set fsdp.shard (ZeRO 1 to 3), and drop it",
}  # fmt: skip
"""What other tools have and this one has not."""
_OF_LAUNCHERS = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "rdzv_backend",
    "rdzv_endpoint", "rdzv_id", "max_restarts",
)  # fmt: skip


def suggest_section(written: str) -> str:
    """For the name of a table that there is not."""
    if key := _SECTION_KEYS.get(written.lower()):
        return f"did you mean {key}?"
    name = _SECTIONS.get(written.lower(), written)
    return f"did you mean [{name}]?" if name in SECTIONS else _bracketed(nearest(name, SECTIONS))


def suggest(written: str, flags: Iterable[str] = ()) -> str:
    """For a dotted key, or an option without its dashes, that there is not.

    Args:
        written: As the user wrote it.
        flags: Options without a section that are allowed too.
    """
    name = written.lower().replace("-", "_")
    above, _, last = name.rpartition(".")
    if last in _OF_LAUNCHERS and not above:
        return "it is the launcher's; write it before train.py, or use `fsdmoe train`, which takes both"
    if last in _ABSENT:
        return _ABSENT[last]
    known = {key.name: key.name.rpartition(".")[2] for key in all_keys()}
    found = ALIASES.get(name) or ALIASES.get(last) or (name if name in known else None)
    if found is None:
        homes = [key for key, own in known.items() if own == last]
        found = " or ".join(homes[:3])
    if not found and not above:
        found = _close(f"--{written.lower().replace('_', '-')}", flags, 0.7)
    if not found:
        beside = {own: key for key, own in known.items() if key.rpartition(".")[0] == above}
        found = beside.get(_close(last, beside, 0.6), "")
    if not found:
        found = _close(name, known, 0.75) or next(
            (key for key, own in known.items() if own == _close(last, known.values(), 0.75)), ""
        )
    return f"did you mean {found}?" if found else _look_for(above, last)


def _look_for(above: str, last: str) -> str:
    return f"see --help {above}" if above.partition(".")[0] in SECTIONS else f"see --help {last}, or --help"


def _close(name: str, known: Iterable[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def _bracketed(text: str) -> str:
    """The section of an answer by :func:`nearest`, written as in a file."""
    before, mean, name = text.partition("did you mean ")
    return f"{before}{mean}[{name.removesuffix('?')}]?" if mean else text
