"""Gradients of a scaled loss in a loop of one's own: unscaled where they are clipped, and said if not."""

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import LossScaleConfig, LossScaler
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, count_of, shard_tiny
from tests.support.tiny_modules import batch_of


def scaled_and_not(degrees: dict[str, int], max_norm: float) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Norms and gradients of a plain loss and of a scaled one."""
    case = Case(degrees=degrees)
    model, found = shard_tiny(case, build_meshes(**degrees)), []
    for scaler in (None, LossScaler(LossScaleConfig(initial=4096))):
        loss = model(*batch_of(0, 0, dist.get_rank()), count_of(case))
        (loss if scaler is None else scaler.scale(loss)).backward()
        norm = clip_grad_norm(model, max_norm, scaler)
        norms = [norm.total.item(), norm.dense.item(), norm.expert.item()]
        found.append((norms, [p.grad.full_tensor() for p in model.parameters()]))
        engine_of(model).zero_grad()
    return found


@pytest.mark.parametrize(
    ("degrees", "max_norm"),
    [
        ({"ep": 2}, 0.01),
        ({"dp_outer": 2}, math.inf),
        pytest.param({"ep": 2}, math.inf, marks=pytest.mark.full),
        pytest.param({"dp_outer": 2}, 0.01, marks=pytest.mark.full),
    ],
)
def test_clipping_unscales_by_the_scaler(degrees: dict[str, int], max_norm: float) -> None:
    for (plain_norms, plain), (norms, gradients) in run_ranks(scaled_and_not, 2, degrees, max_norm):
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        for gradient, wanted in zip(gradients, plain, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8)


def norms_around(bad: float, scaled: bool) -> list[bool]:
    """Which of four steps have a finite norm; the loss of the second is multiplied by ``bad``."""
    case = Case()
    model, scaler, found = shard_tiny(case, build_meshes()), LossScaler(enabled=scaled), []
    gaps = [g.grad.plan.layout.padding_ranges() for g in engine_of(model).groups if g.grad is not None]
    assert any(gaps), "the case has gradients with gaps between them"
    for step in range(4):
        loss = model(*batch_of(step, 0, dist.get_rank()), count_of(case))
        scaler.scale(loss * (bad if step == 1 else 1.0)).backward()
        found.append(clip_grad_norm(model, 0.01, scaler).is_finite())
        engine_of(model).zero_grad()
    return found


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_not_finite_is_gone_with_its_step(bad: float, scaled: bool) -> None:
    assert run_ranks(norms_around, 1, bad, scaled) == [[True, False, True, True]]


def warnings_of(kind: str, scaler: LossScaler | None) -> int:
    """How many warnings three steps give."""
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    case = Case(precision=PrecisionConfig(param_dtype=kind))  # type: ignore[arg-type]
    model = shard_tiny(case, build_meshes())
    optimizer, logger = AdamW(model), logging.getLogger("fsdmoe")
    logger.addHandler(handler)
    try:
        for step in range(3):
            loss = model(*batch_of(step, 0, 0), count_of(case))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None or scaler.update(clip_grad_norm(model, 1.0, scaler).total):
                optimizer.step()
            optimizer.zero_grad()
    finally:
        logger.removeHandler(handler)
    return sum(record.levelno == logging.WARNING for record in records)


@pytest.mark.parametrize(
    ("kind", "scaled", "number"), [("float16", 0, 1), ("float16", 1, 0), ("bfloat16", 0, 0)]
)
def test_float16_without_a_scaler_is_said_once(kind: str, scaled: int, number: int) -> None:
    assert run_ranks(warnings_of, 1, kind, LossScaler(num_tokens=12) if scaled else None) == [number]
