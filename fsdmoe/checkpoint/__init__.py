"""Checkpoints that reshard to anything and cannot be lost; Hugging Face interchange."""

from fsdmoe.checkpoint.api import LoadPolicy, load, save
from fsdmoe.checkpoint.checkpointer import Checkpointer
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.parts import Checkpointed

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointed",
    "Checkpointer",
    "DamagedCheckpointError",
    "LoadPolicy",
    "load",
    "save",
]
