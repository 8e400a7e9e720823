"""Checkpoints that reshard to anything and cannot be lost: save, load, verify, and Hugging Face interchange."""

from fsdmoe.checkpoint.config import CheckpointConfig

__all__ = ["CheckpointConfig"]
