"""Gradients that forward makes already, in the place where backward will want them.

A loss that is computed chunk by chunk has its weight's gradient before backward begins. Kept beside the
gradient buffers it would be as large as they are, at the moment when activations are at their peak. So it is
made in the unit's gradient slot, which nobody uses between a forward and its backward; should somebody need
the place after all (another model call's backward comes first), the gradient moves out and waits elsewhere.
"""

from __future__ import annotations

import torch


class StagedGradient:
    """A gradient of an operation whose backward has not run yet."""

    def __init__(self, place: torch.Tensor) -> None:
        self.tensor = place
        self.in_place = True
        """``tensor`` is where the reduction will read; False: somebody else needed the place."""

    def move_out(self) -> None:
        self.tensor, self.in_place = self.tensor.clone(), False
