"""The order in which units run, recorded, so that the next one can be gathered ahead of time."""

from __future__ import annotations

from fsdmoe.fsdp.unit import Unit


class RunOrder:
    """The recorded sequence of units: from where a run differs from it, it is recorded again."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.num_changes = 0
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def advance(self, unit: Unit) -> Unit | None:
        """``unit`` runs now; returns the unit that ran after it the last time, if all went as recorded so
        far."""
        at, self._next = self._next, self._next + 1
        if at < len(self.units) and self.units[at] is not unit:
            self.num_changes += 1
            del self.units[at:]
        if at == len(self.units):
            self.units.append(unit)
        return self.units[at + 1] if at + 1 < len(self.units) else None
