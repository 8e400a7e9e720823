"""The numbers of one AdamW update, for every kernel and reference that makes one; and the update in plain
torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdmoe.precision.block_floats import (
    BlockFloats,
    ElementPlace,
    Moment,
    encode,
    random_bits,
    read,
    round_stochastically,
)

# Elements computed at a time in plain torch, in fp32 and as integers: what stays in a CPU's cache, or enough
# for a GPU.
CHUNK, GPU_CHUNK = 1 << 17, 1 << 22


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """``step`` counts from 1; all tensors are fp32 scalars on the device."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: torch.Tensor
    found_inf: torch.Tensor | None = None


def adamw_small_reference_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    numbers: AdamWStep,
    place: ElementPlace | None,
    *,
    stochastic: bool = False,
) -> None:
    """AdamW in plain torch with moments in any precision, in fp32 inside, a chunk at a time; ``stochastic``
    rounds main weights to bfloat16 stochastically. ``place``: not needed where nothing is rounded so. Nothing
    waits for the device."""
    chunk = GPU_CHUNK if main.is_cuda else CHUNK
    for start in range(0, main.numel(), chunk):
        part = slice(start, start + chunk)
        _update_chunk(
            main[part], grad[part], exp_avg[part], exp_avg_sq[part], numbers,
            None if place is None else place.after(start), stochastic,
        )  # fmt: skip


def _update_chunk(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    numbers: AdamWStep,
    place: ElementPlace | None,
    stochastic: bool,
) -> None:
    grad, step = grad.float(), numbers.step
    old_average, old_square = read(exp_avg, signed=True), read(exp_avg_sq, signed=False)
    average = old_average.lerp(grad, 1 - numbers.beta1)
    square = (old_square * numbers.beta2).addcmul_(grad, grad, value=1 - numbers.beta2)
    denominator = (square / (1 - numbers.beta2**step)).sqrt_().add_(numbers.eps)
    update = (average / (1 - numbers.beta1**step)).div_(denominator)
    update.add_(main.float(), alpha=numbers.weight_decay)
    keep = None if numbers.found_inf is None else numbers.found_inf == 0
    if keep is not None:
        update = torch.where(keep, update, 0.0)
    first, second, third = (None,) * 3 if place is None else random_bits(place, step, main.numel())
    if stochastic:
        assert third is not None
        new = round_stochastically(main.float().add_(update, alpha=-numbers.lr), third)
        main.copy_(new if keep is None else torch.where(keep, new, main.float()))
    else:
        main.add_(update.to(main.dtype), alpha=-numbers.lr)
    _store(exp_avg, average, first, keep, signed=True)
    _store(exp_avg_sq, square, second, keep, signed=False)


def _store(
    moment: Moment,
    values: torch.Tensor,
    random: torch.Tensor | None,
    keep: torch.Tensor | None,
    *,
    signed: bool,
) -> None:
    pairs = [(moment, values)] if isinstance(moment, torch.Tensor) else []
    if isinstance(moment, BlockFloats):
        assert random is not None
        coded = encode(values, random, signed=signed)
        pairs = [(moment.codes, coded.codes), (moment.exponents, coded.exponents)]
    for into, new in pairs:
        into.copy_(new if keep is None else torch.where(keep, new.to(into.dtype), into))
