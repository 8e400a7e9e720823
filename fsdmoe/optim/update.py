"""One AdamW update of some ranges: by a fused kernel where one can run, else in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdmoe.kernels.adamw_step import AdamWStep, adamw_small_reference_
from fsdmoe.kernels.backend import triton_for
from fsdmoe.optim.torchao_moments import TorchaoMoment, update_by_torchao
from fsdmoe.optim.update_ranges import GroupMoments, UpdateRange


def update(settings: dict[str, Any], ranges: Sequence[UpdateRange], found_inf: torch.Tensor | None) -> None:
    """Step ``ranges`` with the settings of their parameter group."""
    left = [s for s in ranges if not _update_fused(s, settings, found_inf)]
    alike: list[UpdateRange] = []
    is_skipped: bool | None = None
    for piece in left:
        if isinstance(piece.exp_avg, TorchaoMoment):
            if is_skipped is None:  # torchao's update has no such flag: the host has to know
                is_skipped = found_inf is not None and bool(found_inf)
            if not is_skipped:
                assert isinstance(piece.exp_avg_sq, TorchaoMoment)
                update_by_torchao(
                    piece.main, piece.grad, piece.exp_avg, piece.exp_avg_sq, piece.step, settings
                )
        elif piece.place is None and _dtypes(piece) == {piece.main.dtype}:
            alike.append(piece)
        else:
            assert not isinstance(piece.exp_avg_sq, TorchaoMoment)
            adamw_small_reference_(
                piece.main, piece.grad, piece.exp_avg, piece.exp_avg_sq,
                _numbers(piece, settings, found_inf), piece.place, stochastic=piece.stochastic,
            )  # fmt: skip
    if alike:
        beta1, beta2 = settings["betas"]
        torch._fused_adamw_(
            [s.main for s in alike],
            [s.grad for s in alike],
            [s.exp_avg for s in alike],  # type: ignore[misc]
            [s.exp_avg_sq for s in alike],  # type: ignore[misc]
            [],
            [s.step for s in alike],
            lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
            eps=settings["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=found_inf,
        )  # fmt: skip


def _dtypes(piece: UpdateRange) -> set[torch.dtype]:
    buffers = (piece.grad, piece.exp_avg, piece.exp_avg_sq)
    return {buffer.dtype for buffer in buffers if isinstance(buffer, torch.Tensor)}


def _numbers(piece: UpdateRange, settings: dict[str, Any], found_inf: torch.Tensor | None) -> AdamWStep:
    beta1, beta2 = settings["betas"]
    return AdamWStep(
        lr=settings["lr"], beta1=beta1, beta2=beta2, eps=settings["eps"],
        weight_decay=settings["weight_decay"], step=piece.step, found_inf=found_inf,
    )  # fmt: skip


def rounds_weights(moments: GroupMoments) -> bool:
    """Whether an update of a group's main weights also writes those in compute precision."""
    weights = moments.group.weights
    if triton_for(weights.main) is None or moments.by_torchao:
        return False
    return weights.scales is None or moments.writes_codes


def _update_fused(piece: UpdateRange, settings: dict[str, Any], found_inf: torch.Tensor | None) -> bool:
    """One launch for everything, where it can run; whether it did."""
    exp_avg = piece.exp_avg
    exp_avg_sq = piece.exp_avg_sq
    if isinstance(exp_avg, TorchaoMoment) or isinstance(exp_avg_sq, TorchaoMoment):
        return False
    fused = triton_for(piece.main)
    if fused is None:
        return False
    numbers = _numbers(piece, settings, found_inf)
    buffers = (piece.main, piece.grad, exp_avg, exp_avg_sq)
    if piece.codes is not None:
        for part, codes in piece.codes:
            fused.adamw_codes_(*(buffer[part] for buffer in buffers), numbers, codes)
    else:
        fused.adamw_(*buffers, numbers, weight=piece.cast, place=piece.place, stochastic=piece.stochastic)
    return True
