"""The reference of a sharded model with adapters: what TRL asks for, without TRL."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.reference import settle_reference
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.trl_case import build_model

pytestmark = [
    requires_transformers,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft"),
]


def ask_for_a_copy(model: Any) -> None:
    """As a trainer of TRL does while it is made."""
    config = model.peft_config["default"]
    model.add_adapter("ref", config)
    for name, parameter in model.named_parameters():
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)


def find_references() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ids = torch.arange(12).view(2, 6)
    for adapters in ("fresh", "made", "alone"):
        model: Any = build_model(2, adapters)
        ask_for_a_copy(model)
        try:
            settle_reference(model)
        except ConfigError as error:
            found[adapters] = str(error)
            continue
        with torch.no_grad():
            before = model(ids).logits
            for name, parameter in model.named_parameters():
                if ".default." in name:
                    parameter.add_(0.5)
            trained = model(ids).logits
            if "ref" in model.peft_config:
                model.set_adapter("ref", inference_mode=True)
                reference = model(ids).logits
            else:
                with model.disable_adapter():
                    reference = model(ids).logits
        same = torch.allclose(reference, before, atol=1e-6)
        found[adapters] = ("ref" in model.peft_config, same, torch.allclose(trained, before, atol=1e-3))
    return found


def test_the_reference_is_the_model_before_training_or_refused() -> None:
    for found in run_ranks(find_references, 2):
        assert found["fresh"] == (False, True, False)  # by switching adapters off
        assert found["made"] == (True, True, False)  # by a copy
        assert found["alone"].startswith("adapter: expected adapters that change nothing yet")


def forward_too_early() -> str:
    model: Any = build_model(2, "fresh")
    ask_for_a_copy(model)
    with pytest.raises(ConfigError) as caught:
        model(torch.arange(12).view(2, 6))
    return str(caught.value)


def test_a_trainer_that_was_not_prepared_is_refused() -> None:
    assert "got new ones (ref)" in run_ranks(forward_too_early, 2)[0]
