"""What the training loop passes on: facts of the run once, a record after each step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What does not change from a start of a run to its end."""

    flops_per_token: float
    """Of training, forward and backward (:func:`fsdmoe.models.training_flops_per_token`, where all of
    a decoder is trained)."""

    total_steps: int
    """The number of the last step."""

    tokens_per_step: int
    """Over all ranks and micro-batches, with what is padding."""

    num_ranks: int
    """Devices that share the work."""

    device: torch.device
    """Of this rank; the others' are taken to be alike."""

    start_step: int = 0
    """Steps that were done before this start."""

    start_tokens: int | None = None
    """Tokens of these, as records count them; none: rows up to the first record are taken for full."""

    ep: int = 1
    """Ranks that experts are split over."""

    num_experts: int = 1
    """Of a layer, as far as the configuration says (else 1); routers may know choices behind them that are of
    no rank."""

    when_uneven: str = ""
    """What to do where one of these computes far more than others; empty where it is done."""

    described: Mapping[str, object] = field(default_factory=dict)
    """Further lines of the summary: preset, meshes, optimizer, ..."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as the loop saw it. Everything but ``loads`` is already a plain number on the host.

    The loop may hand over every step or only those that ``Observer.wants``: the fields mean the same in both
    cases.
    """

    step: int
    """Number of this step, from 1: the number of steps done once it is over."""

    tokens: int
    """Tokens trained on since the beginning of the run, all ranks, this step included; padding is none."""

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

    sources: Mapping[str, Mapping[str, float]] | None = None
    """Per source of the data, figures of how far it was read: tokens, epochs, weight."""

    skipped: int = 0
    """Steps skipped so far in the run because of a non-finite loss or gradient."""

    loss_scale: float | None = None
    """What the loss is multiplied by from here on, in a run whose gradients pass through float16."""

    operands: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None
    """In a step whose quantised operands were observed, figures by projection and operand: largest magnitude
    ``amax``, shares ``underflow`` and ``overflow``, ``scales`` by their powers of two."""

    exchange: Mapping[str, float] | None = None
    """Of the ``flex`` dispatcher: ``fill``, how full the fullest receive buffer of any rank was since the
    last row; since the start, how many steps were ``repeated`` and layers (of evaluations) ``rerouted``
    because rows did not fit."""

    attention_logits: Mapping[str, float] | None = None
    """With ``optim.qk_clip``: the largest attention logit of each layer, of the sample that was looked at."""

    rewards: Mapping[str, float] | None = None
    """Of pairs of answers, means over the step: ``reward_margin`` between chosen and rejected answers, and
    ``reward_accuracy``, the share of pairs where it is above 0."""
