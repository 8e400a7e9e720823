"""The router's product on tensor cores."""

import torch

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
