"""The MoE layer on a GPU: the fused experts, waits for the device, the shared experts' stream, NCCL ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.dispatch import Links, build_dispatcher
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import requires_gpu, requires_nccl
from tests.support.experts_by_products import experts_mlp_grouped
from tests.support.one_gpu import free_port, run_ranks_on_one_gpu

E, D, N, K = 16, 256, 128, 4


def _layer(*, shared: bool = True) -> MoE:
    with torch.device("cuda"):
        layer = MoE(
            Router(RouterSpec(num_experts=E, top_k=K, norm_topk=True), D),
            GroupedExperts(E, D, N),
            shared_experts=SharedExperts(D, N) if shared else None,
        ).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return layer


def _relative(got: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(got).all()
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


@requires_gpu
@pytest.mark.parametrize("share", [1.0, 0.3], ids=["all mine", "some mine"])
def test_both_implementations_agree_with_the_loop_and_never_wait(share: float) -> None:
    x = torch.randn(300, D, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(300, E, device="cuda").argsort(1)[:, :K]
    ids[torch.rand(ids.shape, device="cuda") > share] = -1
    leaves = [
        x,
        torch.rand(300, K, device="cuda"),
        torch.randn(E, 2 * N, D, device="cuda", dtype=torch.bfloat16) * D**-0.5,
        torch.randn(E, D, N, device="cuda", dtype=torch.bfloat16) * N**-0.5,
    ]
    results = []
    for function in (experts_mlp_reference, experts_mlp_grouped, experts_mlp):
        x, weights, gate_up, down = inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        torch.cuda.set_sync_debug_mode("default" if function is experts_mlp_reference else "error")
        try:
            y = function(Rows(x, weights, ids), ExpertWeights(gate_up, down))
            gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((y, *gradients))
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            assert _relative(got, expected) < 2e-2


@requires_gpu
def test_uninitialised_tail_rows_do_no_harm() -> None:
    """Fresh memory is filled with NaN here, so a tail that is read would show."""
    x = torch.randn(64, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.full((64, K), -1, device="cuda")
    ids[::3, 0] = torch.arange(22, device="cuda") % E
    weights = torch.rand(64, K, device="cuda", requires_grad=True)
    gate_up = torch.randn(E, 2 * N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(E, D, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    poison = torch.full((1 << 26,), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison  # the allocator hands this block out again, NaN and all
    y = experts_mlp_grouped(Rows(x, weights, ids), ExpertWeights(gate_up, down))
    gradients = torch.autograd.grad(y, [x, weights, gate_up, down], torch.ones_like(y))
    assert all(torch.isfinite(tensor).all() for tensor in (y, *gradients))


@requires_gpu
def test_slow_shared_experts_on_their_stream_are_waited_for() -> None:
    """Sleeps on the side stream make a missing wait visible, also that of who reads a weight's gradient."""
    layer = _layer()
    shared = layer.shared_experts
    assert shared is not None
    x = torch.randn(512, D, device="cuda", dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        for parameter in layer.parameters():  # buffers that gradients are added to, as sharding has them
            parameter.grad = torch.zeros_like(parameter)
        rows, read = x.clone().requires_grad_(), []
        rows.register_hook(lambda _: read.extend(p.grad.clone() for p in shared.parameters()))
        y, _ = layer(rows)
        doubled = y * 2
        doubled.sum().backward()
        assert rows.grad is not None
        return [doubled, rows.grad * 1, *read, *(p.grad.clone() for p in layer.parameters())]

    def sleep(*_: object) -> None:
        torch.cuda._sleep(100_000_000)

    def sleep_now_and_in_backward(*_: object) -> None:
        sleep()
        hooks.extend(parameter.register_hook(sleep) for parameter in shared.parameters())

    results()  # kernels are compiled here, which takes longer than any sleep
    hooks = [shared.register_forward_pre_hook(sleep_now_and_in_backward)]
    beside = results()
    for hook in hooks:
        hook.remove()
    layer._routed._side.run = lambda function, x: function(x)  # type: ignore[method-assign]
    layer._routed._side.join = lambda y: y  # type: ignore[method-assign]
    for got, expected in zip(beside, results(), strict=True):
        assert _relative(got, expected) < 1e-2


@requires_nccl
@pytest.mark.parametrize(("dispatcher", "num_waits"), [("local", 0), ("allgather", 1), ("all_to_all", 1)])
def test_a_layer_waits_for_the_device_at_most_once(
    dispatcher: str, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.setdefault("MASTER_PORT", free_port())
    meshes = build_meshes()
    try:
        layer = _layer()
        chosen, _ = build_dispatcher(dispatcher, Links.of(meshes), num_experts=E, top_k=K)
        layer.exchange_by(chosen)
        x = torch.randn(256, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x)[0].sum().backward()  # communicators and kernels are built here
        torch.cuda.synchronize()
        waits, wait = [], torch.cuda.Event.synchronize

        def counted(event: torch.cuda.Event) -> None:
            waits.append(event)
            wait(event)

        # The debug mode raises at every other kind of wait, and does not see those for events.
        monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
        torch.cuda.set_sync_debug_mode("error")
        layer(x)[0].sum().backward()
        assert len(waits) == num_waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


@requires_nccl
def test_four_nccl_ranks_equal_one_process() -> None:
    print(run_ranks_on_one_gpu(4, "-m", "tests.support.moe_nccl_ranks"))
