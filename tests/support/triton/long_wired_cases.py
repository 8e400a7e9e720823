"""Cases of ``interpreted_*.py`` that take longest: two ranks, a compiler, two attentions."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.triton import TopKPolicy, experts_mlp_triton, router_topk_triton
from fsdmoe.testing import run_ranks
from tests.support.moe_case import Case, Layout, check_layout
from tests.support.triton import older_interpreter
from tests.support.triton.interpreted_cases import draw
from tests.support.triton.interpreted_wired_cases import check_whole_model, launches  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("preset", ["tiny-mixtral", "tiny-deepseek-v3"])
def test_the_whole_model_equals_plain_torch(
    preset: str,
    monkeypatch: pytest.MonkeyPatch,
    launches: list[str],  # noqa: F811
) -> None:
    check_whole_model(preset, monkeypatch, launches)


def dispatch_with_kernels() -> float:
    older_interpreter.correct()
    with kernels("triton"):
        return check_layout(Layout(2), [Case("all_to_all", "dropped")])


def test_the_dispatcher_over_ranks_equals_one_process_with_kernels() -> None:
    run_ranks(dispatch_with_kernels, 2)


def test_the_layer_and_the_router_compile_as_one_graph() -> None:
    inputs = draw()
    policy = TopKPolicy(top_k=2, score="sigmoid")
    logits = torch.randn(18, 3, generator=torch.Generator().manual_seed(1))

    def whole(logits, x, gate_up, down):  # type: ignore[no-untyped-def]
        routed = router_topk_triton(logits, None, policy)
        y = experts_mlp_triton(x, routed.weights, routed.ids, gate_up, down)
        return y.square().sum() + routed.prob_sum.square().sum() + routed.z_sum

    def grads(function) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        leaves = [t.clone().requires_grad_() for t in (logits, inputs[0], inputs[3], inputs[4])]
        return torch.autograd.grad(function(*leaves), leaves)

    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(grads(compiled), grads(whole), strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_compiled_layer_takes_any_number_of_rows() -> None:
    """Its tiles are chosen while sizes are still open: rows, and all others of a first compilation too."""
    compiled = torch.compile(experts_mlp_triton, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_rows in (18, 11):
        inputs = draw(num_rows)
        assert torch.equal(compiled(*inputs), experts_mlp_triton(*inputs))
