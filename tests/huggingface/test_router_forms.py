"""Routers, recognised by trying them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.huggingface.router_forms import is_router_like, router_form
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import tiny_hf

GROUPED = {"num_groups": 2, "topk_groups": 1, "scaling": 1.5}


def router_of(family: str) -> nn.Module:
    model = tiny_hf(family, randomized=False)
    router = next(m for name, m in model.named_modules() if name.endswith((".gate", ".router")))
    assert is_router_like(router)
    return router


@requires_transformers
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("qwen3_moe", RouterSpec(num_experts=8, top_k=2)),
        ("mixtral", RouterSpec(num_experts=4, top_k=2, norm_topk=True)),
        ("gpt_oss", RouterSpec(num_experts=4, top_k=2, score="topk_softmax", norm_topk=True)),
        ("granite_shared", RouterSpec(num_experts=4, top_k=2, score="topk_softmax", norm_topk=True)),
        ("deepseek_v2", RouterSpec(num_experts=8, top_k=2, group_score="max", **GROUPED)),  # type: ignore[arg-type]
        ("deepseek_v3", RouterSpec(num_experts=8, top_k=2, score="sigmoid", norm_topk=True, **GROUPED)),  # type: ignore[arg-type]
    ],
)
def test_a_router_is_found_to_be_what_its_family_says(family: str, spec: RouterSpec) -> None:
    form = router_form(router_of(family))
    assert form is not None
    scored = "softmax_topk" if spec.norm_topk and spec.score != "sigmoid" else spec.score
    # A softmax over the chosen is that over all, divided by the sum of the chosen.
    assert form.spec.score in (spec.score, scored)
    for name in ("top_k", "scaling", "num_groups", "topk_groups"):
        assert getattr(form.spec, name) == getattr(spec, name)
    assert form.spec.num_groups == 1 or form.spec.group_score == spec.group_score
    assert form.wide_product == family.startswith("deepseek")
    assert form.correction == ("e_score_correction_bias" if family == "deepseek_v3" else None)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        weights, ids = self.logits_for_choice(logits).softmax(-1).topk(2, dim=-1)
        return logits, weights, ids

    def logits_for_choice(self, logits: Tensor) -> Tensor:
        return logits


class Noisy(Plain):
    def logits_for_choice(self, logits: Tensor) -> Tensor:
        return logits + torch.randn_like(logits)


class Jittered(Plain):
    """Draws noise in training alone."""

    def logits_for_choice(self, logits: Tensor) -> Tensor:
        return logits + torch.randn_like(logits) if self.training else logits


class Sharpened(Plain):
    def logits_for_choice(self, logits: Tensor) -> Tensor:
        return 2 * logits


class Narrowed(Plain):
    """Computes its logits in another precision than that of x."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.half(), self.weight.half()).to(x.dtype)
        weights, ids = logits.float().softmax(-1).topk(2, dim=-1)
        return logits, weights, ids


class Table(nn.Module):
    """A weight, and nothing that routes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:1] + x


def test_a_router_of_another_form_has_none() -> None:
    assert router_form(Plain()) is not None
    for module in (Noisy(), Jittered().eval(), Sharpened(), Narrowed(), Table()):
        assert is_router_like(module)
        assert router_form(module) is None
    assert not is_router_like(nn.Linear(4, 8))
