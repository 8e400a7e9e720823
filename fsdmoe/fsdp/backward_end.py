"""Notices the end of a backward, also of one that raises."""

from __future__ import annotations

from collections.abc import Callable


class BackwardEnd:
    """Autograd calls it at the end of a backward, and drops it uncalled where that raised."""

    def __init__(self, at_end: Callable[[], None], when_dropped: Callable[[], None]) -> None:
        self._at_end: Callable[[], None] | None = at_end
        self._when_dropped = when_dropped

    def __call__(self) -> None:
        at_end, self._at_end = self._at_end, None
        assert at_end is not None
        at_end()

    def __del__(self) -> None:
        if self._at_end is not None:
            self._when_dropped()
