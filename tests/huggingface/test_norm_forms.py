"""Norms of other libraries are recognised by what they compute, and compute the same afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.huggingface.fused_layers import FusedLayers
from fsdmoe.huggingface.norm_forms import NormForm, norm_form


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.randn(size) / 4)

    def normed(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * self.weight).to(x.dtype)


class OffsetNorm(PlainNorm):
    """Gemma's and Qwen3-Next's: the weight is an offset from one, added in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * (1 + self.weight.float())).to(x.dtype)


class GatedNorm(PlainNorm):
    opened: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        opened = getattr(self, "_opened", self.opened)
        return (self.normed(x) * self.weight * opened(gate.float())).to(x.dtype)


class SigmoidNorm(GatedNorm):
    opened = staticmethod(torch.sigmoid)


class GateFirst(PlainNorm):
    """Mamba 2's: the gated rows are normed."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x * F.silu(gate))


class GeluNorm(GatedNorm):
    opened = staticmethod(F.gelu)


class ClampedNorm(GatedNorm):
    opened = staticmethod(lambda gate: F.silu(gate.clamp(max=7)))


class GateOrNot(GateFirst):
    """Mamba 2's as transformers writes it: without a gate it is the plain norm."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x, gate) if gate is not None else PlainNorm.forward(self, x)


class HalfOffset(PlainNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * (0.5 + self.weight)).to(x.dtype)


FORMS = [
    (PlainNorm, NormForm()),
    (OffsetNorm, NormForm(offset=1.0)),
    (GatedNorm, NormForm(is_gated=True, silu=True)),
    (SigmoidNorm, NormForm(is_gated=True)),
    (GateFirst, None),
    (GeluNorm, None),
    (ClampedNorm, None),
    (GateOrNot, None),
    (HalfOffset, None),
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_form_is_found_by_what_the_norm_computes(kind: type[PlainNorm], form: NormForm | None) -> None:
    assert norm_form(kind(8), "eps") == form


@pytest.mark.parametrize("kind", [PlainNorm, OffsetNorm, GatedNorm, SigmoidNorm])
def test_a_norm_is_taken_only_in_the_dtype_of_its_weight(kind: type[PlainNorm]) -> None:
    module = kind(8)
    own = copy.deepcopy(module)
    assert FusedLayers(nn.Sequential(module)).apply() == "1 norms"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = [torch.randn(3, 8).to(dtype) for _ in range(1 + issubclass(kind, GatedNorm))]
        found, expected = module(*given), own(*given)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [OffsetNorm, GatedNorm, SigmoidNorm])
def test_gradients_are_those_of_the_norm_itself(kind: type[PlainNorm]) -> None:
    module = kind(8)
    own = copy.deepcopy(module)
    FusedLayers(nn.Sequential(module)).apply()
    given = [torch.randn(2, 3, 8, requires_grad=True) for _ in range(1 + issubclass(kind, GatedNorm))]
    dout = torch.randn(2, 3, 8)
    ours, theirs = (torch.autograd.grad(m(*given), [*given, m.weight], dout) for m in (module, own))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 1, 8), (8,)])
def test_a_gate_of_another_shape_is_left_to_the_norm_itself(shape: tuple[int, ...]) -> None:
    module = GatedNorm(8)
    x, gate = torch.randn(2, 3, 8), torch.randn(shape)
    expected = module(x, gate)
    FusedLayers(nn.Sequential(module)).apply()
    with mock.patch.object(NormForm, "of", side_effect=AssertionError):
        torch.testing.assert_close(module(x, gate), expected)


def test_norms_of_one_class_with_other_functions_are_each_tried() -> None:
    norms = [GatedNorm(8), GatedNorm(8), GatedNorm(8)]
    norms[1].opened = F.gelu
    norms[2]._opened = F.gelu  # a setting is one whatever its name
    assert FusedLayers(nn.Sequential(*norms)).apply() == "1 norms; left as they are: 2 norms of another form"


def test_qwen3_next_has_no_norm_left() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_hidden_layers=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    line = FusedLayers(model).apply()
    assert line.startswith("14 norms, ")
    assert "norms of another form" not in line
