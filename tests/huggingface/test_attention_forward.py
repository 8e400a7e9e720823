"""The forward of transformers' attention modules, with our functions behind two of its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.huggingface import attention_forward as module_under_test
from fsdmoe.huggingface.attention_forward import attention_forward
from fsdmoe.testing import requires_transformers

pytestmark = requires_transformers


class Grouped(nn.Module):
    num_key_value_groups = 2
    is_causal = True


def calls(**changes: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, generator=random) for heads in (4, 2, 2))
    return {"query": query, "key": key, "value": value, "attention_mask": None} | changes


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, in the place of transformers' sdpa, as if a GPU took all of its calls."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monkeypatch.setattr(module_under_test, "takes_cudnn", lambda *_: True)
    return module_under_test._attention(sdpa_attention_forward)


MASK = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None]


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"scaling": 0.3}, {"attention_mask": MASK.expand(2, 1, 6, 6)}, {"is_causal": False},
        {"is_causal": True}, {"sliding_window": 3, "attention_mask": MASK.expand(2, 1, 6, 6)},
        {"position_bias": torch.ones(1, 4, 6, 6)},
    ],
)  # fmt: skip
def test_attention_is_that_of_transformers(attention: Any, changes: dict[str, Any]) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found, weights = attention(Grouped(), **calls(**changes))
    expected, _ = sdpa_attention_forward(Grouped(), **calls(**changes))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()
    assert weights is None


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"attention_mask": MASK}, True),
        ({"dropout": 0.1}, False),
        ({"is_causal": False}, False),
        ({"position_bias": torch.ones(1, 4, 6, 6)}, False),
        ({"s_aux": torch.ones(4)}, False),
        ({"softcap": 3.0}, False),
    ],
)
def test_what_is_not_understood_goes_to_transformers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ours: bool
) -> None:
    monkeypatch.setattr(module_under_test, "takes_cudnn", lambda *_: True)
    reached = []

    def own(module: Any, *args: Any, position_bias: Any = None, **kwargs: Any) -> tuple[Any, None]:
        reached.append(True)
        return None, None

    call = calls(**changes)
    tensors = [call.pop(name) for name in ("query", "key", "value", "attention_mask")]
    module_under_test._attention(own)(Grouped(), *tensors, **call)
    assert reached == ([] if ours else [True])


def test_other_implementations_keep_their_functions() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.mixtral import modeling_mixtral as home

    table = module_under_test._Attentions(home.ALL_ATTENTION_FUNCTIONS)
    assert table.get_interface("eager", home.eager_attention_forward) is home.eager_attention_forward
    assert table.get_interface("flash_attention_2", None) is home.ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    assert table.get_interface("sdpa", None) is module_under_test._attention(sdpa_attention_forward)


def test_nothing_of_transformers_is_changed() -> None:
    from transformers.models.mixtral import modeling_mixtral as home

    own, before = home.MixtralAttention.forward, dict(vars(home))
    made = attention_forward(own)
    assert made is not None
    assert made.turns
    assert made.attends
    assert made.forward is not own
    assert attention_forward(own) is made  # one function for all layers, or each would be compiled for itself
    assert {name: vars(home)[name] for name in before} == before


def test_a_module_that_calls_neither_is_no_attention() -> None:
    assert attention_forward(nn.Linear.forward) is None
    assert attention_forward(nn.MultiheadAttention.forward) is None
