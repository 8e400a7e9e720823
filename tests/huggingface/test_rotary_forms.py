"""Rotary functions, recognised by trying them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdmoe.huggingface.rotary_forms import RotaryForm, fused_rotation, rotary_form, takes_rotary_arguments
from fsdmoe.testing import requires_transformers


def function_of(family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


@requires_transformers
@pytest.mark.parametrize(
    ("family", "name", "interleaved", "entries", "partial"),
    [
        ("qwen3_moe", "apply_rotary_pos_emb", False, ("both",), False),
        ("glm4_moe", "apply_rotary_pos_emb", False, ("both",), True),
        ("gpt_oss", "apply_rotary_pos_emb", False, ("pair",), False),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", True, ("first", "both"), False),
    ],
)
def test_the_form_of_each_family_is_found(
    family: str, name: str, interleaved: bool, entries: tuple[str, ...], partial: bool
) -> None:
    function = function_of(family, name)
    form = rotary_form(function)
    assert takes_rotary_arguments(function)
    assert form is not None
    assert (form.interleaved, form.partial) == (interleaved, partial)
    assert form.entries in entries  # older versions read all of a table


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (q * cos.unsqueeze(1), k * sin.unsqueeze(1))


def failing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError


def test_other_functions_have_none() -> None:
    assert rotary_form(backwards) is None
    assert rotary_form(failing) is None
    assert not takes_rotary_arguments(torch.cat)
    assert not takes_rotary_arguments(lambda q, k, freqs: (q, k))


def test_a_function_that_may_be_called_without_keys_is_called_so() -> None:
    def own(q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = q * cos + torch.cat((-q[..., 4:], q[..., :4]), dim=-1) * sin
        return turned if k is None else (turned, own(k, cos=cos, sin=sin, unsqueeze_dim=0))

    q, (cos, sin) = torch.randn(2, 3, 5, 8), torch.randn(2, 2, 5, 8)
    rotate: Any = fused_rotation(own, RotaryForm(interleaved=False, entries="both"))
    found = "not called"
    try:
        found = rotate(q, cos=cos, sin=sin)
    except TypeError as error:
        found = str(error)
    assert isinstance(found, Tensor), found
    assert torch.equal(found, own(q, cos=cos, sin=sin))


def test_without_a_kernel_the_function_itself_is_called() -> None:
    calls = []

    def own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        calls.append(unsqueeze_dim)
        return q, k

    rotate = fused_rotation(own, RotaryForm(False, "both"))
    tensors = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    rotate(*tensors)
    rotate(*tensors, unsqueeze_dim=2)
    assert calls == [1, 2]
