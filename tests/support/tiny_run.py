"""A run small enough for tests: the tiny Qwen3 preset on a few of the standard library's files."""

from __future__ import annotations

import copy
from typing import Any

from fsdmoe.config import Config, build_config

TINY: dict[str, Any] = {
    "model": {"preset": "tiny-qwen3", "vocab_size": 264},
    "precision": {"param_dtype": "float32"},
    "data": {"kind": "python-stdlib", "max_bytes": 200_000, "seq_len": 32},
    "experts": {"balance": {"sequence": 0.01}},
    "optim": {"lr": 1e-2, "warmup_steps": 2},
    "observe": {"tensorboard": False, "progress": "off", "log_interval": 1},
    "checkpoint": {"interval": -1, "load": "none"},
    "train": {
        "steps": 20,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "eval_interval": 10,
        "eval_batches": 1,
    },
}


def tiny_config(output_dir: str, world_size: int, **overrides: Any) -> Config:
    """The tiny configuration with dotted overrides (``__`` for the dot)."""
    problems: list[str] = []
    mapping = copy.deepcopy(TINY)
    mapping["train"]["output_dir"] = output_dir
    dotted = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    config = build_config(mapping, dotted, world_size, problems)
    assert config is not None, problems
    return config
