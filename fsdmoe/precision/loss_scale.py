"""Loss scaling: what keeps gradients inside of float16's narrow range.

float16 holds nothing below 6e-8, and the gradient of a mean over millions of tokens is smaller than that.
So the loss is multiplied by a scale before backward, and gradients are divided by it before they are read: in
the pass over them that clips, or in one of its own where nothing is clipped. A scale that is too large makes
gradients infinite, so it is found by trying::

    gradients are finite                        the step is taken; after growth_interval such steps in a row
                                                the scale is multiplied by growth_factor
    some gradient is infinite or not a number   the step is skipped, and the scale is multiplied by
                                                backoff_factor, down to minimum

The decision follows from the global gradient norm, one number that all ranks have in common, so the scale is
the same on all of them without being sent. It is kept on the host, which must read the norm anyway to decide
about a skip.

In a loop of your own::

    scaler = LossScaler()
    scaler.scale(loss).backward()
    norm = fsdmoe.clip_grad_norm(model, 1.0, scaler)        # unscales, and clips; math.inf only unscales
    if scaler.update(norm.total):
        optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdmoe.core.errors import refuse

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INITIAL = 2.0**16


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """By what the loss is multiplied for gradients in float16, and how that moves."""

    initial: float | None = None
    """The first scale. None takes the number of tokens in a step, rounded up to a power of two: backward
    then works on gradients of the summed loss. In a loop of one's own, 65536."""
    growth_interval: int = 2000
    """Finite steps in a row after which the scale grows. 0: a static scale, which neither grows nor falls."""
    growth_factor: float = 2.0
    """What the scale is multiplied by when it grows."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by when a gradient is not finite; that step is skipped."""
    minimum: float = 1.0
    """The scale never falls below. There, steps that are not finite count for train.max_skipped_steps."""

    def __post_init__(self) -> None:
        wanted = {
            "growth_interval": ("0 or more", self.growth_interval >= 0),
            "growth_factor": ("a number above 1", 1 < self.growth_factor < math.inf),
            "backoff_factor": ("a number above 0 and below 1", 0 < self.backoff_factor < 1),
            "minimum": ("a number above 0", 0 < self.minimum < math.inf),
        }
        problems = [
            f"precision.loss_scale.{key}: expected {what}, got {getattr(self, key)}; change it or drop the "
            "line to take the default"
            for key, (what, holds) in wanted.items()
            if not holds
        ]
        if not problems and self.initial is not None and not self.minimum <= self.initial < math.inf:
            problems.append(
                f"precision.loss_scale.initial: expected precision.loss_scale.minimum = {self.minimum} or "
                f"more, got {self.initial}; raise it, or lower the minimum"
            )
        refuse(problems)

    @property
    def is_static(self) -> bool:
        return self.growth_interval == 0


class LossScaler:
    """The scale of one run; see the module's text. Every rank has one, and all of them change in the same
    way."""

    def __init__(
        self,
        config: LossScaleConfig | None = None,
        *,
        num_tokens: int | None = None,
        enabled: bool = True,
    ) -> None:
        """``num_tokens``: those that the loss is a mean over, for a scale that no configuration names. One
        that is not ``enabled`` does nothing, at no cost: for runs in bfloat16 or float32."""
        self.config, self.enabled = config or LossScaleConfig(), enabled
        first = self.config.initial
        if first is None:
            first = INITIAL if num_tokens is None else 2.0 ** math.ceil(math.log2(max(1, num_tokens)))
        self.value = max(first, self.config.minimum) if enabled else 1.0
        """What the loss is multiplied by now."""
        self.num_skipped = 0
        """Steps skipped so far, those before a resume included."""
        self.fell = False
        """Whether the last step lowered it: a scale that was too large may be the only reason for the
        skip."""
        self._num_finite = 0
        self._told_zero = self._told_minimum = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on."""
        return loss * self.value if self.enabled else loss

    @property
    def can_fall(self) -> bool:
        """Whether one more step that is not finite would lower the scale."""
        return self.enabled and not self.config.is_static and self.value > self.config.minimum

    def update(self, grad_norm: torch.Tensor | float) -> bool:
        """Take note of a step by its global gradient norm; whether the optimizer may step. The norm must be
        the same number on all ranks. Waits for the device where it is still there."""
        norm = float(grad_norm)
        is_finite = math.isfinite(norm)
        if self.enabled:
            self.fell = not is_finite and self.can_fall
            if is_finite:
                self._note_finite(norm)
            else:
                self._note_overflow()
        return is_finite

    def _note_finite(self, norm: float) -> None:
        if norm == 0.0 and not self._told_zero:
            self._told_zero = True
            logger.warning(
                "loss scale: every gradient is exactly zero at a scale of %g: float16 may have lost them; "
                "set precision.loss_scale.initial higher",
                self.value,
            )
        self._num_finite += 1
        if not self.config.is_static and self._num_finite >= self.config.growth_interval:
            self._num_finite, self.value = 0, self.value * self.config.growth_factor

    def _note_overflow(self) -> None:
        self.num_skipped += 1
        self._num_finite = 0
        if self.fell:
            self.value = max(self.value * self.config.backoff_factor, self.config.minimum)
            logger.info("loss scale: a gradient is not finite; the step is skipped, the scale %g", self.value)
        elif not self._told_minimum:
            self._told_minimum = True
            logger.warning(
                "loss scale: a gradient is not finite at a scale of %g, which cannot fall (%s); a smaller "
                "scale, a lower optim.lr or precision.param_dtype = bfloat16 may help",
                self.value,
                "precision.loss_scale.growth_interval = 0 makes it static"
                if self.config.is_static
                else "precision.loss_scale.minimum",
            )

    # Checkpoints: plain values, the same under every layout.

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        return {"value": self.value, "num_finite": self._num_finite, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a stored scale; a static one is as the configuration has it. A state without one, of a
        run in another precision, changes nothing."""
        if not self.enabled or not state:
            return
        self.num_skipped = int(state["num_skipped"])
        if not self.config.is_static:
            self.value = max(float(state["value"]), self.config.minimum)
            self._num_finite = int(state["num_finite"])
