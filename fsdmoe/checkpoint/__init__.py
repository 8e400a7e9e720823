"""Checkpoints that reshard to anything and cannot be lost; Hugging Face interchange."""

from fsdmoe.checkpoint.api import LoadPolicy, load, save
from fsdmoe.checkpoint.checkpointer import Checkpointer
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.hf_export import ExportPolicy, to_hf
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.checkpoint.parts import Checkpointed
from fsdmoe.checkpoint.upcycle import UpcyclePolicy, upcycle

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointed",
    "Checkpointer",
    "DamagedCheckpointError",
    "ExportPolicy",
    "LoadPolicy",
    "UpcyclePolicy",
    "from_hf",
    "load",
    "save",
    "to_hf",
    "upcycle",
]
