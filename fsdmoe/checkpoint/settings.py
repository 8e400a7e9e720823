"""The settings of an optimizer when its state is loaded: which are the checkpoint's, which the optimizer's.

=======================================  ==================================================================
tensors (moments, step counts)           the checkpoint's
``lr``, ``initial_lr``                   the checkpoint's: schedulers go on from them (``train.py`` sets the
                                         rate at every step, from its own schedule)
``betas``, ``eps``, ``weight_decay`` …   those the optimizer was built with, group by group: who resumes with
(the constructor's numbers and           another ``optim.weight_decay`` means it. A difference is said.
switches, see :data:`BUILT`)             ``LoadPolicy(optimizer_settings="stored")`` takes the checkpoint's,
                                         as ``torch.optim.Optimizer.load_state_dict`` does
everything else in a parameter group     the checkpoint's: some optimizers keep state there
=======================================  ==================================================================
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch

from fsdmoe.checkpoint.agree import world

logger = logging.getLogger(__name__)

OptimizerSettings = Literal["built", "stored"]

BUILT = (
    "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "lambd",
    "t0", "etas", "step_sizes", "lr_decay", "momentum_decay", "decoupled_weight_decay", "amsgrad", "maximize",
    "foreach", "fused", "capturable", "differentiable",
)  # fmt: skip
"""Settings of ``torch.optim``'s optimizers and ours that are chosen when one is built. A closed list: a key
that another optimizer keeps in its groups may be state, which must come back."""


@contextlib.contextmanager
def settled(optimizer: torch.optim.Optimizer, part: str, settings: OptimizerSettings) -> Iterator[None]:
    """A load inside ends with the settings that the policy says; what differs is said."""
    before = [{key: _copied(group[key]) for key in BUILT if key in group} for group in optimizer.param_groups]
    yield
    found = []
    for group, built in zip(optimizer.param_groups, before, strict=True):
        for key, value in built.items():
            if group["params"] and _number(group[key]) != _number(value):
                found.append(f"{key} {_number(group[key])} there, {_number(value)} here")
            if settings == "stored":
                continue
            if isinstance(group[key], torch.Tensor):
                group[key].copy_(value)  # a captured graph reads this very tensor
            else:
                group[key] = value
    if found and world()[0] == 0:
        used = "those of this run are used" if settings == "built" else "the checkpoint's are used"
        differences = "; ".join(dict.fromkeys(found))  # groups mostly agree; once is enough
        logger.warning("%s: other settings than in the checkpoint (%s); %s", part, differences, used)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else value
