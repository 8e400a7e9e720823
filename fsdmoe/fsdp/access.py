"""Who wrote a sharded tensor, and whether it can be read: shared by all tensors that show its memory."""

from __future__ import annotations


class ReadGuard:
    """Why tensors cannot be read now, said once for all of them; ``None`` when they can."""

    problem: str | None = None


class Access:
    """What all aliases of one tensor (``.data``, ``detach()``) share.

    ``writes`` counts how often it was written to, through whichever of them: torch's own counters are each
    alias's own, and ``_foreach_*`` and ``_fused_*`` operations pass them by. Aliases are written on every
    rank, so even where the piece is empty, all ranks count alike."""

    __slots__ = ("_guard", "expired", "is_zeroed", "writes")

    def __init__(self, guard: ReadGuard | None = None) -> None:
        self.writes = 0
        self.expired: str | None = None
        """Why the values are gone for good."""
        self.is_zeroed = False
        """Somebody zeroed it, in place, while it could not be read: whatever was to come is not wanted."""
        self._guard = guard

    @property
    def problem(self) -> str | None:
        if self._guard is None or self.is_zeroed:
            return self.expired
        return self.expired or self._guard.problem
