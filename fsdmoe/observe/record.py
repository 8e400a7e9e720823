"""What the training loop passes on after a step."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as the loop saw it. Everything but ``loads`` is already a plain number on the host.

    The loop may hand over every step or only those that ``Observer.wants``: the fields mean the same in both
    cases.
    """

    step: int
    """Number of this step, from 1: the number of steps done once it is over."""

    tokens: int
    """Tokens trained on since the beginning of the run, all ranks, this step included."""

    loss: float
    """Training loss of this step over all ranks; not a number when the step was skipped for it."""

    lr: float
    """Learning rate of this step."""

    grad_norm: float
    """Global norm of the gradient before clipping."""

    seconds: float
    """Wall-clock seconds of training since the record before (evaluation and checkpoints left out)."""

    loads: Mapping[str, Tensor] | None = None
    """Per MoE layer, how many (token, choice) pairs each global expert received in this step, summed over
    ranks and micro-batches. All of them together cost one copy to the host, on logged steps only."""

    skipped: int = 0
    """Steps skipped so far in the run because of a non-finite loss or gradient."""

    loss_scale: float | None = None
    """What the loss is multiplied by from here on, in a run whose gradients pass through float16."""
