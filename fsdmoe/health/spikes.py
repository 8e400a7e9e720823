"""When a loss is a spike: far above the median of the last ones, in units of their usual deviation."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 32
_FEWEST = 16
_NORMAL = 1.4826
"""Median absolute deviation to standard deviation, of normal numbers."""
_LEAST_DEVIATION = 0.005
"""Of the median: a loss that hardly moves has no spike in its last digits."""


class Spikes:
    """The last losses that were no spikes. All ranks see the same losses, and so come to the same verdict."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether ``loss`` is one; if not, it counts from now on."""
        if len(self._losses) >= _FEWEST:
            middle = median(self._losses)
            deviation = _NORMAL * median(abs(each - middle) for each in self._losses)
            if loss - middle > self._factor * max(deviation, _LEAST_DEVIATION * abs(middle)):
                return True
        self._losses.append(loss)
        return False

    def clear(self) -> None:
        """The run has gone back."""
        self._losses.clear()
