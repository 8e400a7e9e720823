"""The switch between fused kernels and plain torch."""

import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.backend import choose_kernels, kernels, triton_for
from fsdmoe.kernels.rms_norm import RMSNorm


def test_cpu_tensors_take_plain_torch_of_themselves() -> None:
    assert triton_for(torch.zeros(1)) is None


def test_kernels_can_be_forced_and_forbidden_for_a_while() -> None:
    pytest.importorskip("triton")
    with kernels("triton"):
        assert triton_for(torch.zeros(1)) is not None
        with kernels("torch"):
            assert triton_for(torch.zeros(1)) is None
        assert triton_for(torch.zeros(1)) is not None
    assert triton_for(torch.zeros(1)) is None


def test_fp64_never_goes_through_kernels_that_compute_in_fp32() -> None:
    with kernels("triton"):
        assert triton_for(torch.zeros(1, dtype=torch.float64)) is None


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.kernels"):
        choose_kernels("cuda")  # type: ignore[arg-type]


def test_our_norm_is_that_of_torch_with_the_same_state() -> None:
    theirs, ours = torch.nn.RMSNorm(8, eps=1e-5), RMSNorm(8, eps=1e-5)
    theirs.weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x))
    assert list(ours.state_dict()) == ["weight"]
