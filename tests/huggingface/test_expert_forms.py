"""Which experts of transformers are recognised, and as what."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.huggingface.adapters import find_experts, find_unknown_moe
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.testing import requires_transformers
from tests.support.moe_families import MODEL_TYPES, is_installed, tiny_model

pytestmark = requires_transformers

# What differs from fused SwiGLU experts whose gates lie before their ups.
FORMS: dict[str, dict[str, Any]] = {
    "aria_text": {"transposed": True},
    "dbrx": {"gate_up": "mlp.w1", "up": "mlp.v1", "down": "mlp.w2"},
    "deepseek_v4": {"activation": "swiglu_clamped", "limit": 10.0},
    "gemma4_text": {"activation": "geglu_tanh"},
    "gpt_oss": {"activation": "gpt_oss", "transposed": True, "interleaved": True},
    "hy_v4": {"activation": "swiglu_clamped", "limit": 10.0},
    "llama4_text": {"weights_inputs": True, "transposed": True},
    "longcat_flash": {"num_identity": 4},
    "minimax_m3_vl_text": {"activation": "gpt_oss"},
    "nemotron_h": {"activation": "relu2", "gate_up": "up_proj"},
}
WATCHED = (
    "activation", "limit", "up", "transposed", "interleaved", "num_identity", "output_norm", "weights_inputs",
)  # fmt: skip
NOT_SPLIT = ("doge", "jetmoe")
QUICK = ("dbrx", "deepseek_v4", "gemma4_text", "gpt_oss", "llama4_text", "longcat_flash", "nemotron_h")


def form_of(family: str, **changes: Any) -> dict[str, Any]:
    """The fields that differ from the usual ones, alike in all layers."""
    model = tiny_model(family, **changes)
    specs = find_experts(model)
    assert find_unknown_moe(model, specs) == {}
    usual = ExpertsSpec(num_experts=1, hidden_size=1, intermediate_size=1)
    names = [*WATCHED, *({"gate_up", "down"} & FORMS.get(family, {}).keys())]
    found = [{name: getattr(spec, name) for name in names} for spec in specs.values()]
    assert all(form == found[0] for form in found)
    return {name: value for name, value in found[0].items() if value != getattr(usual, name)}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODEL_TYPES]
)
def test_the_experts_of_a_family_are_recognised(family: str) -> None:
    if not is_installed(family):
        pytest.skip(f"this transformers has no {family}")
    if family in NOT_SPLIT:
        assert find_experts(tiny_model(family)) == {}
        return
    usual = ExpertsSpec(num_experts=1, hidden_size=1, intermediate_size=1)
    wanted = FORMS.get(family, {})
    assert form_of(family) == {key: value for key, value in wanted.items() if value != getattr(usual, key)}


@pytest.mark.parametrize("limit", [0.5, 20.0, 1000.0])
def test_a_limit_is_found_however_large(limit: float) -> None:
    assert form_of("deepseek_v4", swiglu_limit=limit) == {"activation": "swiglu_clamped", "limit": limit}


def test_an_activation_that_is_not_known_is_not_taken_for_another() -> None:
    model = tiny_model("qwen3_moe", hidden_act="relu")
    assert find_experts(model) == {}
    assert list(find_unknown_moe(model, ())) == ["Qwen3MoeExperts"]


class Experts(nn.Module):
    """Of the form of most families, but for what the tests change."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(8, 24, 16))
        self.down_proj = nn.Parameter(torch.randn(8, 16, 12))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_TEI, up_TEI = torch.einsum("td,eid->tei", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
        scale = self.get_buffer("scale") if "scale" in self._buffers else 1.0
        inner_TEI = self.dropout(F.silu(gate_TEI) * up_TEI * scale)
        y_TED = torch.einsum("tei,edi->ted", inner_TEI, self.down_proj)
        weights_TE = top_k_weights.new_zeros(y_TED.shape[:2]).scatter(1, top_k_index, top_k_weights)
        return (y_TED * weights_TE.unsqueeze(-1)).sum(1)


def test_what_a_known_form_does_not_compute_is_not_left_out() -> None:
    scaled, replaced = Experts(), Experts()
    scaled.register_buffer("scale", torch.ones(()))  # as it is now; training may change it
    own = replaced.forward
    replaced.forward = lambda *args: 2 * own(*args)  # type: ignore[method-assign]
    others = (Experts(dropout=0.1).eval(), Experts(dropout=0.1).train(), scaled, replaced)
    assert list(find_experts(nn.ModuleList([Experts().eval(), *others]))) == ["0"]


def test_what_is_put_around_the_forward_of_a_family_counts() -> None:
    model = tiny_model("qwen3_moe")
    kind: Any = type(next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts"))
    own = kind.forward

    @functools.wraps(own)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2 * own(*args, **kwargs)

    with mock.patch.object(kind, "forward", doubled):
        assert find_experts(model) == {}
    with mock.patch.object(kind, "forward", functools.wraps(own)(lambda *args: own(*args))):
        assert find_experts(model)


def test_models_on_the_meta_device_are_recognised() -> None:
    with torch.device("meta"):
        model: Any = tiny_model("deepseek_v4")
    assert {spec.activation for spec in find_experts(model).values()} == {"swiglu_clamped"}
