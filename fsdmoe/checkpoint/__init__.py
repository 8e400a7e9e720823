"""Checkpoints that reshard to anything and cannot be lost; Hugging Face interchange."""

from fsdmoe.checkpoint.config import CheckpointConfig

__all__ = ["CheckpointConfig"]
