"""Hand-written derivatives of the gated activations against autograd; values against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from fsdmoe.errors import ConfigError
from fsdmoe.kernels.activations import ACTIVATIONS, activate, activate_backward, activation_of


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_autograds(name: str) -> None:
    z = (
        6 * torch.randn(64, 24, dtype=torch.float64)
    ).requires_grad_()  # wide enough to meet gpt-oss's clamps
    h = activate(z, name)
    dh = torch.randn_like(h)
    (expected,) = torch.autograd.grad(h, z, dh)
    torch.testing.assert_close(activate_backward(z.detach(), dh, name), expected)


def test_gates_come_first_and_ups_last() -> None:
    z = torch.randn(5, 8)
    gate, up = z[:, :4], z[:, 4:]
    torch.testing.assert_close(activate(z, "swiglu"), F.silu(gate) * up)
    torch.testing.assert_close(activate(z, "geglu"), F.gelu(gate) * up)


def test_gpt_oss_clamps_gates_above_and_ups_on_both_sides() -> None:
    z = torch.tensor([[100.0, 100.0], [7.0, 7.0]])
    torch.testing.assert_close(*activate(z, "gpt_oss"))
    z = torch.tensor([[1.0, -100.0], [1.0, -7.0]])
    torch.testing.assert_close(*activate(z, "gpt_oss"))
    assert activate(torch.tensor([[-100.0, 1.0]]), "gpt_oss").abs() < 1e-6


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected one of swiglu, geglu, gpt_oss, got 'relu'"):
        activation_of("relu")
