"""What a run needs of the disk: its data, and folders that it can write to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.config_reader import Problems
from fsdmoe.data import DataConfig, check_data
from fsdmoe.errors import ConfigError


def disk_problems(data: DataConfig, output_dir: str, checkpoint: CheckpointConfig) -> Problems:
    """Whether the data is there, and the folders of the run and of its checkpoints can be written."""
    problems: Problems = []
    try:
        check_data(data)
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
