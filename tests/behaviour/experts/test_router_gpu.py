"""The router's product on tensor cores."""

from dataclasses import replace

import torch

from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.router import RoutingRules
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.scores import logits_and_input
from fsdmoe.testing import requires_gpu


@requires_gpu
def test_logits_on_tensor_cores_equal_fp32() -> None:
    x_TD = torch.randn(300, 512, device="cuda").bfloat16().requires_grad_()
    weight_ED = torch.randn(64, 512, device="cuda").bfloat16().requires_grad_()
    grad_TE = torch.randn(300, 64, device="cuda")
    passed_TD = torch.randn(300, 512, device="cuda").bfloat16()
    logits_TE, onward_TD = logits_and_input(x_TD, weight_ED)
    torch.autograd.backward([logits_TE, onward_TD], [grad_TE, passed_TD])
    wide = [t.detach().double().requires_grad_() for t in (x_TD, weight_ED)]
    expected_TE = wide[0] @ wide[1].t()
    torch.autograd.backward([expected_TE, wide[0]], [grad_TE.double(), passed_TD.double()])
    torch.testing.assert_close(logits_TE, expected_TE.float(), rtol=1e-5, atol=1e-4)
    for mine, theirs in zip((x_TD, weight_ED), wide, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.bfloat16(), rtol=1e-2, atol=1e-2)


@requires_gpu
def test_balance_terms_of_the_fused_router_equal_those_of_plain_torch() -> None:
    """Loss, loads and the gradient of the logits, with a count of the step's tokens on the device."""
    spec = RouterSpec(num_experts=64, top_k=8, norm_topk=True)
    balance = BalanceConfig(sequence=0.01, micro_batch=0.02, z_loss=0.001)
    rules = RoutingRules(spec, ExpertsConfig(balance=balance))
    tokens = torch.tensor(4096.0)
    found = []
    for device in ("cuda", "cpu"):
        logits_TE = torch.randn(2048, 64, generator=torch.Generator().manual_seed(5)).to(device)
        logits_TE.requires_grad_()
        context = RoutingContext.for_rows(4, 512, device=device)
        context = replace(context, num_global_tokens=tokens.to(device))
        routing = rules(logits_TE, logits_TE, None, context)
        routing.loss.backward()
        assert logits_TE.grad is not None
        found.append((routing.loss, routing.load_E, logits_TE.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-9)
