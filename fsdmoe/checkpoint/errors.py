"""What can be wrong with a checkpoint. Every message names the file, tensor or key it is about."""

from __future__ import annotations

from collections.abc import Sequence

from fsdmoe.core.errors import UserError


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or does not hold what was asked for."""


class DamagedCheckpointError(CheckpointError):
    """The bytes are not the bytes that were written: truncated, altered, missing, or never finished."""

    def __init__(self, file: str, why: str) -> None:
        self.file, self.why = file, why
        super().__init__(f"damaged checkpoint: {file}: {why}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.file, self.why)  # it is sent between ranks, and rebuilt from these two texts


def listed(lines: Sequence[str], most: int) -> str:
    """Lines of a message, below each other; of many the first ones, and how many more there are."""
    more = [f"… and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  " + "\n  ".join([*lines[:most], *more])
