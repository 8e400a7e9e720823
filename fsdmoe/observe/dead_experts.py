"""Experts that no token reaches: said while there is still time to change the balance."""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

WINDOW = 10
"""Logged steps that are looked at together: a small batch leaves many experts out in one of them."""
SHARE = 0.25
"""Of a layer's experts; fewer are ordinary in a model of hundreds of them."""
PAUSE = 50
"""Logged steps between two warnings."""


class DeadExperts:
    """Watches the loads of all layers, a logged step at a time."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Tensor]] = deque(maxlen=WINDOW)
        self._pause = 0

    def add(self, loads: Mapping[str, Tensor]) -> str | None:
        """A warning, when it is time for one."""
        if not loads:
            return None
        self._recent.append(loads)
        self._pause = max(self._pause - 1, 0)
        if len(self._recent) < WINDOW or self._pause:
            return None
        dead = {
            layer: int((torch.stack([step[layer] for step in self._recent]).sum(0) == 0).sum())
            for layer in loads
            if all(layer in step for step in self._recent)
        }
        worst = max(dead, key=lambda layer: dead[layer] / loads[layer].numel(), default=None)
        if worst is None or dead[worst] < SHARE * loads[worst].numel():
            return None
        self._pause = PAUSE
        num_layers = sum(count >= SHARE * loads[layer].numel() for layer, count in dead.items())
        return (
            f"warning: {dead[worst]} of {loads[worst].numel()} experts of {worst} received no token in the "
            f"last {WINDOW} logged steps ({num_layers} such layers); raise experts.balance (sequence, "
            "global_batch or bias_rate), or lower optim.lr (docs/routing.md)"
        )
