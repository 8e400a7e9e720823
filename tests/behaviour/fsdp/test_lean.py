"""``fsdp.lean``: what is given back, when, and that nobody loses anything by it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, run_sharded, shard_tiny
from tests.support.tiny_modules import batch_of

LEAN = Case(fsdp={"lean": True}, degrees={"ep": 2}, precision=PrecisionConfig())


def main_grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [group.grad.main for group in engine_of(model).groups]


def memory_over_a_step() -> dict[str, bool]:
    model = shard_tiny(LEAN, build_meshes(**LEAN.degrees))
    engine, optimizer = engine_of(model), AdamW(model, lr=1e-2)
    found = {"copies": any(group.weights.shard is not None for group in engine.groups)}
    found["before"] = any(grad is not None for grad in main_grads(model))
    run_sharded(model, LEAN, 0)
    found["after backward"] = all(grad is not None for grad in main_grads(model))
    run_sharded(model, LEAN, 1)
    found["accumulated"] = all(grad is not None for grad in main_grads(model))
    kept = model.head.weight.grad
    norm = kept.norm().clone()
    released = weakref.ref(model.layers[0].norm.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(*batch_of(2, 0, 0), 12)
    gc.collect()
    found["after a forward"] = any(grad is not None for grad in main_grads(model))
    found["an old gradient is alive"] = released() is not None
    run_sharded(model, LEAN, 2)
    found["a kept gradient is intact"] = torch.equal(kept.norm(), norm)
    return found


def test_gradient_shards_live_from_a_backward_to_the_next_forward() -> None:
    for found in run_ranks(memory_over_a_step, 2):
        assert found == {
            "copies": False,
            "before": False,
            "after backward": True,
            "accumulated": True,
            "after a forward": False,
            "an old gradient is alive": False,
            "a kept gradient is intact": True,
        }


def losses(lean: bool, foreign: bool) -> list[float]:
    case = Case(fsdp={"lean": lean}, degrees=LEAN.degrees, precision=LEAN.precision)
    model = shard_tiny(case, build_meshes(**case.degrees))
    found = []
    for step in range(3):
        if step == 0 and not foreign:
            optimizer: torch.optim.Optimizer = AdamW(model, lr=1e-2)
        elif step == 0:
            with torch.no_grad():
                model(*batch_of(9, 0, 0), 12)  # an optimizer may come after the first forward
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append(run_sharded(model, case, step)[0].item())
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_lean_run_computes_the_same_bit_by_bit() -> None:
    for foreign in (False, True):
        assert run_ranks(losses, 2, True, foreign)[0] == run_ranks(losses, 2, False, foreign)[0]
