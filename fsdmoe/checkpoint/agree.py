"""Ranks agree on what happened, with bytes and numbers only: loading never unpickles, not even peers'
messages.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdmoe.all_ranks import broadcast_bytes, message_device
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.errors import ConfigError
from fsdmoe.lifecycle import any_rank

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
    data = broadcast_bytes(json.dumps(answer).encode())
    if error is not None:
        raise error
    document = json.loads(data)
    if "error" in document:
        kind = ConfigError if document["is_config"] else CheckpointError
        raise kind(document["error"])
    return document["value"]


def anywhere(flag: bool) -> bool:
    """Whether ``flag`` holds on any rank; every rank gets the same answer."""
    return flag if world()[1] == 1 else any_rank(flag, dist.group.WORLD, message_device())  # type: ignore[arg-type]


def together(act: Callable[[], T]) -> T:
    """Run ``act`` on every rank; if it fails anywhere it fails everywhere, with the same kind of error."""
    num_ranks = world()[1]
    if num_ranks == 1:
        with _plain_errors():
            return act()
    error: Exception | None = None
    try:
        with _plain_errors():
            result = act()
    except Exception as caught:  # every rank must reach the exchange below
        error = caught
    kind = 0 if error is None else 2 if isinstance(error, DamagedCheckpointError) else 1
    mine = torch.tensor([kind], device=message_device())
    found = [torch.zeros_like(mine) for _ in range(num_ranks)]
    dist.all_gather(found, mine)
    kinds = torch.cat(found).tolist()
    if not any(kinds):
        return result
    first = kinds.index(max(kinds))
    text = broadcast_bytes(json.dumps([str(error), getattr(error, "file", "")]).encode(), first)
    if error is not None:
        raise error
    message, file = json.loads(text)
    if kinds[first] == 2:
        raise DamagedCheckpointError(file, f"found by rank {first}: {message}")
    raise CheckpointError(f"rank {first}: {message}")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What the file system says (no permission, a full disk) as the error that a run reports in one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"rank {world()[0]}: {type(error).__name__}: {error}") from error
