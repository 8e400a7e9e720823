"""Hand-written derivatives of the activations against autograd; values against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.activations import ACTIVATIONS, activate, activate_backward, activation_of


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_autograds(name: str) -> None:
    z = (6 * torch.randn(64, 24, dtype=torch.float64)).requires_grad_()  # wide enough to meet the limit
    h = activate(z, name, 5.0)
    dh = torch.randn_like(h)
    (expected,) = torch.autograd.grad(h, z, dh)
    torch.testing.assert_close(activate_backward(z.detach(), dh, name, 5.0), expected)


def test_gates_come_first_and_ups_last() -> None:
    z = torch.randn(5, 8)
    gate, up = z[:, :4], z[:, 4:]
    torch.testing.assert_close(activate(z, "swiglu"), F.silu(gate) * up)
    torch.testing.assert_close(activate(z, "geglu"), F.gelu(gate) * up)
    torch.testing.assert_close(activate(z, "geglu_tanh"), F.gelu(gate, approximate="tanh") * up)


def test_without_gates_all_columns_are_activated() -> None:
    z = torch.randn(5, 8)
    torch.testing.assert_close(activate(z, "relu2"), F.relu(z) ** 2)


def test_a_clamped_swiglu_clamps_its_gate_before_or_after_the_activation() -> None:
    z = torch.tensor([[100.0, -100.0]])
    before = F.silu(torch.tensor(5.0)) * -5.0
    assert activate(z, "swiglu_clamped", 5.0).item() == pytest.approx(before.item())
    assert activate(z, "swiglu_clamped_after", 5.0).item() == pytest.approx(-25.0)


def test_gpt_oss_clamps_gates_above_and_ups_on_both_sides() -> None:
    z = torch.tensor([[100.0, 100.0], [7.0, 7.0]])
    torch.testing.assert_close(*activate(z, "gpt_oss"))
    z = torch.tensor([[1.0, -100.0], [1.0, -7.0]])
    torch.testing.assert_close(*activate(z, "gpt_oss"))
    assert activate(torch.tensor([[-100.0, 1.0]]), "gpt_oss").abs() < 1e-6


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"expected one of swiglu, geglu, .*, relu2, got 'relu'"):
        activation_of("relu")
