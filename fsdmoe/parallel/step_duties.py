"""Work that a feature does around each training step, resolved once for a run.

======================  ======================================================================================
duty                    when there is one
======================  ======================================================================================
:class:`SeedDuty`       ``model.hf``: dropout and the like draw by ``train.seed``, the step and the rank
:class:`FlexDuty`       the ``flex`` dispatcher: a step whose rows did not fit is run again
:class:`RecipeDuty`     ``precision.statistics``: figures of quantised operands
:class:`BiasDuty`       ``experts.balance.bias_rate``: routers' biases follow the loads
:class:`ClipDuty`       ``optim.qk_clip``: heads with large logits get smaller weights
:class:`RewardDuty`     ``data.kind = "preference"``: margin and accuracy of rewards
:class:`AverageDuty`    ``optim.ema``: an average follows the weights
======================  ======================================================================================

Those that look after a long run are in :mod:`fsdmoe.health.duties`. A plain run has none. All duties are
collective: every rank has the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.experts.bias import BiasedRouter, update_biases
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.huggingface.preference import PreferenceLM
from fsdmoe.models.causal_lm import CausalLM
from fsdmoe.models.decoder import Decoder
from fsdmoe.models.init import seed_of
from fsdmoe.optim.config import OptimConfig
from fsdmoe.optim.ema import WeightAverage
from fsdmoe.optim.qk_clip import QKClip
from fsdmoe.parallel.build import flex_state_of
from fsdmoe.parallel.quantized_state import QuantizedState, state_of


class StepDuty:
    """What a feature may have to do; by default nothing."""

    def begin(self, step: int) -> None:
        """Before the first forward of step ``step``, counted from 0; again where it is run again."""

    def must_repeat(self, is_finite: bool) -> bool:
        """After backward: whether the step is to be run again, from zeroed gradients."""
        return False

    def discard(self) -> None:
        """The step is run again: drop what was seen of it."""

    def before_update(self, optimizer: torch.optim.Optimizer, loss: float) -> bool:
        """Whether the optimizer is to step with what is finite; it may have other learning rates then."""
        return True

    def after_update(self, loads_LE: Tensor) -> None:
        """The optimizer has stepped; ``loads_LE`` are the step's, of all ranks."""

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        """At the end of the step, skipped or not: what to record of it."""
        return {}


class SeedDuty(StepDuty):
    """Makes what a step draws (dropout, a router's jitter) depend on the seed, the step and the rank alone: a
    run that is resumed draws what it would have drawn, and ranks with other tokens draw otherwise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self, step: int) -> None:
        torch.manual_seed(seed_of(self._seed, "step", step, dist.get_rank()))


class FlexDuty(StepDuty):
    def __init__(self, state: FlexState) -> None:
        self._state = state

    def must_repeat(self, is_finite: bool) -> bool:
        return self._state.must_repeat(is_finite)

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        return {"exchange": self._state.figures()} if is_logged else {}


class RecipeDuty(StepDuty):
    def __init__(self, state: QuantizedState) -> None:
        self._state = state

    def discard(self) -> None:
        self._state.discard_step()

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        return {"operands": self._state.end_step()}


class BiasDuty(StepDuty):
    def __init__(self, routers: Sequence[BiasedRouter], rate: float) -> None:
        self._routers = routers
        self._rate = rate

    def after_update(self, loads_LE: Tensor) -> None:
        update_biases(zip(self._routers, loads_LE, strict=True), rate=self._rate)


class ClipDuty(StepDuty):
    def __init__(self, clip: QKClip) -> None:
        self._clip = clip

    def discard(self) -> None:
        self._clip.reset()

    def after_update(self, loads_LE: Tensor) -> None:
        self._clip.step()

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        self._clip.reset()  # of a step that was skipped
        if not is_logged:
            return {}
        largest = enumerate(self._clip.largest())
        return {"attention_logits": {f"layer {number}": value for number, value in largest}}


class RewardDuty(StepDuty):
    def __init__(self, decoder: PreferenceLM) -> None:
        self._decoder = decoder

    def begin(self, step: int) -> None:
        self._decoder.rewards_2 = None  # of a step that is run again, too

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        rewards_2 = self._decoder.rewards_2
        if not is_logged or rewards_2 is None:
            return {}
        dist.all_reduce(rewards_2)  # no two ranks share pairs: tp and cp are refused
        margin, accuracy = rewards_2.tolist()
        return {"rewards": {"reward_margin": margin, "reward_accuracy": accuracy}}


class AverageDuty(StepDuty):
    def __init__(self, average: WeightAverage) -> None:
        self._average = average

    def after_update(self, loads_LE: Tensor) -> None:
        self._average.update()


def step_duties(
    model: nn.Module,
    decoder: CausalLM,
    bias_rate: float,
    optim: OptimConfig,
    average: WeightAverage | None,
    *,
    seed: int = 0,
) -> list[StepDuty]:
    """Those of a model from ``parallelize``, which training calls as ``decoder``."""
    duties: list[StepDuty] = []
    if not isinstance(model, Decoder):  # ours draw nothing in training
        duties.append(SeedDuty(seed))
    if (flex := flex_state_of(model)) is not None:
        duties.append(FlexDuty(flex))
    if (quantized := state_of(model)) is not None:
        duties.append(RecipeDuty(quantized))
    if bias_rate and (routers := decoder.routers()):
        duties.append(BiasDuty(routers, bias_rate))
    if optim.qk_clip:
        duties.append(ClipDuty(QKClip(model, optim.qk_clip, rows=optim.qk_clip_rows)))
    if isinstance(decoder, PreferenceLM):
        duties.append(RewardDuty(decoder))
    if average is not None:  # behind whatever changes weights
        duties.append(AverageDuty(average))
    return duties
