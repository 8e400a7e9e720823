"""What optimizers or anybody else wrote to the weights is what the next forward computes with."""

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, update
from fsdmoe.precision.config import PrecisionConfig, torch_dtype
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import FP32, Case, relative, run_sharded, shard_tiny, take_routing
from tests.support.tiny_modules import batch_of, reference

DEBUG = {"debug": True}

WRITES: dict[str, Callable[[nn.Module, float], object]] = {
    "each": lambda model, by: [p.mul_(by) for p in model.parameters()],
    "data": lambda model, by: [p.data.mul_(by) for p in model.parameters()],
    "detached": lambda model, by: [p.detach().copy_(p.full_tensor() * by) for p in model.parameters()],
    "foreach": lambda model, by: torch._foreach_mul_(list(model.parameters()), by),
    "DTensor": lambda model, by: [p.copy_(p.to_dtensor() * by) for p in model.parameters()],
    "state dict": lambda model, by: [value.mul_(by) for value in model.state_dict().values()],
    "memory": lambda model, by: (
        [p.piece.data.mul_(by) for p in model.parameters()],
        engine_of(model).mark_changed(),
    ),
}


def write_weights(precision: PrecisionConfig) -> dict[str, float]:
    """By way to write: the worst loss between forwards, after an optimizer's step and without one. What one
    halves the other doubles, so that no way begins with weights that say nothing."""
    case = Case(fsdp=DEBUG, precision=precision, model={"num_layers": 2})
    dtype = torch_dtype(precision.param_dtype)
    model, plain = shard_tiny(case, build_meshes()), reference(num_layers=2).to(dtype)
    optimizer, batch, found = AdamW(model, lr=1e-2), batch_of(9, 0, 0), dict.fromkeys(WRITES, 0.0)
    with torch.no_grad():
        before = model(*batch, 12)
    for step, way in enumerate(WRITES):
        for by in (0.5, 2.0):
            if by == 0.5:
                run_sharded(model, case, step)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                WRITES[way](model, by)
                plain.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
                wanted = plain(*batch, 12)
                found[way] = max(found[way], relative(model(*batch, 12), wanted))
            assert relative(before, wanted) > 0.05, "what is stale would show"
            before = wanted
    return found


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        pytest.param(FP32, 1e-5, id="float32", marks=pytest.mark.full),
        pytest.param(PrecisionConfig(), 2e-2, id="bfloat16"),  # weights beside the main ones
    ],
)
def test_a_forward_sees_what_was_written_to_the_weights(precision: PrecisionConfig, tolerance: float) -> None:
    for found in run_ranks(write_weights, 2, precision):
        assert max(found.values()) < tolerance, found


@contextlib.contextmanager
def rounding_optimizer() -> Iterator[None]:
    """As on a GPU, the optimizer's kernel rounds the weights itself, and the next forward does not."""
    from tests.support.kernel_references import adamw_reference_

    def update_(main: torch.Tensor, *others: object, weight: torch.Tensor | None, **_: object) -> None:
        """Past version counters, as kernels write."""
        adamw_reference_(main.data, *others, weight=None if weight is None else weight.data)

    fused = types.SimpleNamespace(adamw_=update_)
    with unittest.mock.patch.object(update, "triton_for", return_value=fused):
        yield


def step_again(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.step()


def step_on_infinity(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.step(found_inf=torch.ones(()))


def fail_in_forward(model: nn.Module, optimizer: AdamW) -> None:
    model.layers[2].fails = True
    with contextlib.suppress(ValueError):
        model(*batch_of(7, 0, dist.get_rank()), 12)
    model.layers[2].fails = False


def run_in_another_order(model: nn.Module, optimizer: AdamW) -> None:
    model.plan = (2, 0)


def write_and_step_without_gradients(model: nn.Module, optimizer: AdamW) -> None:
    """No kernel rounds what was written."""
    optimizer.zero_grad()
    with torch.no_grad():
        WRITES["each"](model, 0.5)
    optimizer.step()


BETWEEN = [
    step_again, step_on_infinity, fail_in_forward, run_in_another_order, write_and_step_without_gradients,
]  # fmt: skip
LAYOUTS = {
    "replicas": (4, Case(degrees={"dp_outer": 2})),
    "experts of two": (2, Case(degrees={"ep": 2})),
    "frozen": (2, Case(before="freeze_some")),
    "whole weights": (2, Case(fsdp={"shard": "grads"})),
    "host memory": (2, Case(fsdp={"cpu_offload": True})),
    "lean": (2, Case(fsdp={"lean": True})),
}


def look_twice(case: Case, between: Callable[[nn.Module, AdamW], None]) -> None:
    """Every forward equals one for which everything is gathered anew."""
    case = replace(case, precision=PrecisionConfig(), fsdp={**case.fsdp, **DEBUG})
    with rounding_optimizer():
        model = shard_tiny(case, build_meshes(**case.degrees))
        optimizer, engine = AdamW(model, lr=3e-2), engine_of(model)
        for step in range(2):
            run_sharded(model, case, step)
            optimizer.step()
            between(model, optimizer)
            optimizer.zero_grad()
            losses = []
            for _ in range(2):
                with torch.no_grad():
                    losses.append(model(*batch_of(9, 0, dist.get_rank()), 12))
                engine.mark_changed()
            assert torch.equal(*losses)
            take_routing(model)


@pytest.mark.parametrize("between", BETWEEN)
def test_what_happens_after_a_step_leaves_nothing_stale(between: Callable[[nn.Module, AdamW], None]) -> None:
    run_ranks(look_twice, 2, Case(), between)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_leave_nothing_stale_in_any_layout(layout: str) -> None:
    world_size, case = LAYOUTS[layout]
    run_ranks(look_twice, world_size, case, step_again)


def torchs_optimizer(name: str, **options: bool) -> list[float]:
    """Losses under an optimizer of torch, stepped over the sharded parameters."""
    case = Case(fsdp=DEBUG)
    model = shard_tiny(case, build_meshes())
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(3):
        loss, _ = run_sharded(model, case, 0)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# Those of AdamW beside one process: tests/fsdp/test_torch_tools.py.
@pytest.mark.parametrize("name", ["SGD", pytest.param("AdamW", marks=pytest.mark.full)])
def test_torchs_optimizers_train_alike_in_all_their_forms(name: str) -> None:
    wanted = run_ranks(torchs_optimizer, 2, name)[0]
    assert wanted[0] - wanted[-1] > 1e-3
    for form in ("foreach", "fused"):
        found = run_ranks(functools.partial(torchs_optimizer, name, **{form: True}), 2)[0]
        assert found == pytest.approx(wanted, rel=1e-5), form
