"""The CUDA side of a capture: one stream, one memory pool for all graphs of a run.

Graphs of one pool use the same memory one after the other. Nothing that a graph makes may be read once
another has been replayed, so results are copied to memory outside of the pool as the last thing that a graph
does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recorder:
    """Captures on a stream of its own, into one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = 0
        """Device memory that all graphs share; whoever drops them sets it to 0."""

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """``work``, which is issued but not done; to be repeated on the current stream."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what steps without graphs used: the pool takes its place
        before = torch.cuda.memory_reserved(self._device)
        # Other threads (those that prepare data, NCCL's watchdog) go on with calls of their own meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        self.pool_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph

    def free_bytes(self) -> int:
        """Device memory for work without a graph: what is free, and what torch has kept of such work."""
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + max(0, kept - self.pool_bytes)

    def random_state(self) -> bytes:
        """Another one once random numbers were drawn on the device."""
        return torch.cuda.get_rng_state(self._device).numpy().tobytes()


def recorded(recorder: Recorder, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph:
    """``work`` as a graph.

    Raises:
        RuntimeError: It cannot be one; with the cause, and what to set.
    """
    try:
        return recorder.record(work)
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f'train.graphs: {what} could not be captured ({_cause(error)}); set train.graphs = "none"'
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first: the end of a broken capture raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
