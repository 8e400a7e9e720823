"""Rows that are sent to experts in eight bits: what it saves, what it costs, that all dispatchers agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.dispatch import FlexPolicy, Links, Packing, Rows, build_dispatcher
from fsdmoe.kernels.packed_rows import pack_rows, unpack_rows
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks

WIDTH, NUM_EXPERTS, TOP_K = 2048, 16, 2


def _run(dispatcher: str, ep: int, etp: int, packs: bool) -> tuple[dict[str, int], Tensor, Tensor, Tensor]:
    """Traffic, outputs and gradients of this rank's tokens; each row is multiplied by its summed weight."""
    links, packing = Links.of(build_meshes(ep=ep, etp=etp)), Packing(rows=packs, grads=packs)
    d, _ = build_dispatcher(
        dispatcher,
        links,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        packing=packing,
        flex=FlexPolicy(rows=8.0),
    )
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(rank)
    num_tokens = 5 * rank  # rank 0 has none
    x = torch.randn(num_tokens, WIDTH, generator=random, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(num_tokens, TOP_K, generator=random, requires_grad=True)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K]
    plan, rows = d.prepare(Rows(x, weights, ids))
    rows = d.gather(plan, d.dispatch(plan, rows))
    held = torch.where(rows.ids_RK >= 0, rows.weights_RK, 0).sum(1, keepdim=True).to(x.dtype)
    y = d.restore(plan, d.combine(plan, d.reduce(plan, rows.x_RD * held / etp)))
    dy = torch.randn(y.shape, generator=random, dtype=y.dtype)
    dx, dweights = torch.autograd.grad(y, (x, weights), dy)
    return dict(d.traffic.bytes_sent), y.detach(), dx, dweights


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "allgather", "flex"])
def test_half_the_bytes_travel_and_only_rounding_is_lost(dispatcher: str, ep: int, etp: int) -> None:
    plain, packed = (run_ranks(_run, 4, dispatcher, ep, etp, packs) for packs in (False, True))
    saved = {"dispatch", "gather", "combine.backward", "reduce.backward"}
    for (before, *exact), (after, *found) in zip(plain, packed, strict=True):
        for phase, num_bytes in before.items():
            if phase not in saved or not num_bytes:
                assert after[phase] == num_bytes, phase
            else:  # the forward legs carry weights and ids beside the rows
                assert 0.5 < after[phase] / num_bytes < 0.53, phase
        for one, other in zip(found, exact, strict=True):
            if other.numel():
                assert 0.005 < relative(one, other) < 0.1


def test_a_row_is_rounded_once_however_many_ranks_it_passes() -> None:
    results = [run_ranks(_run, 4, name, 2, 2, True) for name in ("all_to_all", "allgather", "flex")]
    for (_, *one), *others in zip(*results, strict=True):
        for _, *other in others:
            for found, expected in zip(one, other, strict=True):
                assert relative(found, expected) < 5e-3, "sums in another order, rounded to bf16"


def test_nothing_is_rounded_that_stays_on_its_rank() -> None:
    x = torch.randn(4, WIDTH)
    assert not torch.equal(unpack_rows(pack_rows(x), WIDTH, x.dtype), x)
    links, packing = Links.alone(), Packing(rows=True)
    d, _ = build_dispatcher("local", links, num_experts=NUM_EXPERTS, top_k=TOP_K, packing=packing)
    plan, rows = d.prepare(Rows(x, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64)))
    assert torch.equal(d.gather(plan, d.dispatch(plan, rows)).x_RD, x)
