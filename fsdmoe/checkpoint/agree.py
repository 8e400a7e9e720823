"""Ranks agree on what happened, with bytes and numbers only: loading never unpickles, not even peers'
messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError

T = TypeVar("T")


def world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without torch.distributed."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def from_first(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on the first rank (JSON), on every rank; its error is everyone's error."""
    rank, num_ranks = world()
    if num_ranks == 1:
        with _plain_errors():
            return make()
    answer: dict[str, Any] = {}
    error: Exception | None = None
    if rank == 0:
        try:
            with _plain_errors():
                answer = {"value": make()}
        except Exception as caught:  # sent to the others before it is raised here
            error = caught
            answer = {"error": str(caught), "is_config": isinstance(caught, ConfigError)}
    document = from_all_ranks(answer)[0]
    if error is not None:
        raise error
    if "error" in document:
        kind = ConfigError if document["is_config"] else CheckpointError
        raise kind(document["error"])
    return document["value"]


def together(act: Callable[[], T]) -> T:
    """Run ``act`` on every rank; if it fails anywhere it fails everywhere, with the same kind of error."""
    error: Exception | None = None
    try:
        with _plain_errors():
            result = act()
    except Exception as caught:  # every rank must reach the exchange below
        error = caught
    failure = None if error is None else [str(error), None]
    if isinstance(error, DamagedCheckpointError):
        failure = [error.why, error.file]  # its text names the file once more
    told = from_all_ranks(failure)
    if error is not None:
        raise error
    failures = [(rank, *failure) for rank, failure in enumerate(told) if failure is not None]
    for rank, message, file in failures:
        if file is not None:
            raise DamagedCheckpointError(file, f"found by rank {rank}: {message}")
    if failures:
        rank, message, _ = failures[0]
        raise CheckpointError(f"rank {rank}: {message}")
    return result


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What the file system says (no permission, a full disk) as the error that a run reports in one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"rank {world()[0]}: {type(error).__name__}: {error}") from error
