"""How often a sharded tensor was written, and whether it can be read: shared by all tensors that view its
memory."""

from __future__ import annotations

from typing import Any, Protocol


class Pending(Protocol):
    """Work under way; ``wait`` orders the caller's further work behind it. ``torch.cuda.Event`` is one, as is
    the handle of a transfer."""

    def wait(self) -> None: ...


class ReadGuard:
    """Why tensors cannot be read now, one reason for all of them; ``None`` when they can."""

    problem: str | None = None
    is_coded = False
    """The values are kept in another form, and made again when asked for: they are in no checkpoint."""
    engine: Any = None
    """A weak reference to the engine whose weights it guards."""
    pending: Pending | None = None
    """Until then another stream, or a collective, reads or writes the memory."""

    def wait(self) -> None:
        """Order what the caller's stream does next behind it. It stays pending, for other streams: to wait
        for what is done costs nothing."""
        if self.pending is not None:
            self.pending.wait()


class Access:
    """What all aliases of one tensor (``.data``, ``detach()``) share.

    ``writes`` counts how often it was written to, through any of them: torch keeps a counter for each alias,
    and ``_foreach_*`` and ``_fused_*`` operations do not raise it. Aliases are written on every rank, so even
    where the piece is empty, all ranks count alike."""

    __slots__ = ("__weakref__", "_guard", "expired", "is_zeroed", "writes")

    def __init__(self, guard: ReadGuard | None = None) -> None:
        self.writes = 0
        self.expired: str | None = None
        """Why the values can never be read again."""
        self.is_zeroed = False
        """It was zeroed in place while it could not be read: what backward was to write there is to be
        dropped."""
        self._guard = guard

    @property
    def problem(self) -> str | None:
        if self._guard is not None:
            self._guard.wait()
        if self._guard is None or self.is_zeroed:
            return self.expired
        return self.expired or self._guard.problem

    @property
    def engine(self) -> Any:
        """Whose weights these are; none for other tensors, and once it is gone."""
        return None if self._guard is None or self._guard.engine is None else self._guard.engine()

    @property
    def is_coded(self) -> bool:
        return self._guard is not None and self._guard.is_coded

    def outlive_guard(self) -> None:
        """The memory is no longer anybody else's: what becomes of the next gradient does not matter here."""
        self._guard = None
