"""Moments in torchao's formats on a GPU, where both updates are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.optim import AdamW
from fsdmoe.testing import requires_gpu
from tests.support.moment_case import backward, build, plain_step, step

torchao_optim = pytest.importorskip("torchao.optim")
pytestmark = requires_gpu

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Meshes of this process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kept", "theirs"),
    [("torchao_8bit", "AdamW8bit"), ("torchao_4bit", "AdamW4bit"), ("torchao_float8", "AdamWFp8")],
)
def test_steps_follow_torchaos_optimizer_of_the_plain_model(kept: Any, theirs: str) -> None:
    model = build({})
    params = {name: nn.Parameter(p.full_tensor().clone()) for name, p in model.named_parameters()}
    optimizer = AdamW(list(model.parameters()), weight_decay=0.1, moment_dtype=kept, **SETTINGS)
    other = getattr(torchao_optim, theirs)(list(params.values()), weight_decay=0.1, **SETTINGS)
    for number in range(3):
        plain_step(params, other, number)
        step(model, optimizer, number)
    for name, parameter in model.named_parameters():
        apart = (parameter.full_tensor() - params[name]).abs()
        # Compiled for other shapes, a last bit may differ and flip a code here and there.
        assert apart.mean() < 1e-3 * SETTINGS["lr"], name
        assert apart.max() < SETTINGS["lr"], name


def trained(make: Any) -> dict[str, torch.Tensor]:
    """Whole weights after three steps of the optimizer that ``make`` builds."""
    model = build({})
    optimizer = make(model)
    # Tokens differ: attention to equal ones has gradients of rounding errors alone, which Adam enlarges.
    rows = torch.randint(80, (2, 16), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        backward(model, rows)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}


def test_the_optimizer_on_the_host_steps_as_torchs_on_the_gpu() -> None:
    settings = SETTINGS | {"weight_decay": 0.1, "eps": 1e-4}

    def on_host(model: nn.Module) -> Any:
        return torchao_optim.CPUOffloadOptimizer(model.parameters(), **settings)

    def on_gpu(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), fused=True, **settings)

    wanted, found = trained(on_gpu), trained(on_host)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)
