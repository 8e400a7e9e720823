"""What a run needs of the disk: its data, a tokenizer that fits the model, and folders that it can write
to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.config.values import Problems
from fsdmoe.data import DataConfig, check_data
from fsdmoe.errors import ConfigError
from fsdmoe.models.config import ModelConfig


def disk_problems(
    model: ModelConfig, data: DataConfig, output_dir: str, checkpoint: CheckpointConfig
) -> Problems:
    """Whether the data is there and its tokens are known to the model, and the folders of the run and of its
    checkpoints can be written."""
    problems: Problems = []
    try:
        num_tokens = check_data(data).vocab_size
        problems += _vocabulary_problems(model, data.vocab_size or num_tokens)
    except ConfigError as error:
        problems.extend(error.problems)
    folders = {"train.output_dir": output_dir}
    if checkpoint.interval >= 0 and checkpoint.folder and "://" not in checkpoint.folder:
        folders["checkpoint.folder"] = checkpoint.folder
    for key, name in folders.items():
        folder = Path(name).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            problems.append(
                f"{key}: expected a folder to write to, got {name!r} ({error.strerror}); name another"
            )
    return problems


def _vocabulary_problems(model: ModelConfig, num_tokens: int) -> Problems:
    if num_tokens <= model.vocab_size:
        return []
    fix = f"raise it to at least {num_tokens}"
    if model.hf is not None:
        fix = f"set data.tokenizer = {model.hf!r}, or another that the model was made for"
    return [f"model.vocab_size: the tokenizer has {num_tokens} tokens, the model {model.vocab_size}; {fix}"]
