"""What peft can put into a model and is not known here is refused by its name, before anything is split."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.lora import peel
from fsdmoe.huggingface.peft_modules import refuse_adapters, refuse_unknown_adapters
from fsdmoe.testing import requires_peft
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_peft
SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_layers": 1, "adapter_len": 4, "target_modules": "self_attn"},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 8},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "VBLORA": {"vector_length": 8},
    "WAVEFT": {"n_frequency": 8},
}
"""What kinds of adapters need in a model as tiny as this, beside the modules and a number of tokens."""
SAMPLE = ("ADALORA", "IA3", "LOHA", "PROMPT_TUNING", "VERA")


def kinds() -> dict[str, Any]:
    """Every kind of adapter of the installed peft but LoRA, and X-LoRA, which is made of folders."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return {kind: config for kind, config in known.items() if kind not in ("LORA", "XLORA")}


def made(kind: str, config: Any) -> nn.Module:
    import peft

    fields = config.__dataclass_fields__
    common = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4}
    chosen = {key: value for key, value in common.items() if key in fields} | SETTINGS.get(kind, {})
    return peel(peft.get_peft_model(tiny_hf("llama"), config(**chosen)))  # type: ignore[arg-type]


def reasons(names: tuple[str, ...]) -> dict[str, str]:
    """Why each kind is refused; those whose own dependencies are missing are left out."""
    found = {}
    for kind in names:
        try:
            model = made(kind, kinds()[kind])
        except ImportError:
            continue
        with pytest.raises(ConfigError) as caught:
            refuse_unknown_adapters(model)
        found[kind] = str(caught.value)
    return found


def test_other_kinds_of_adapters_are_refused_by_name() -> None:
    for kind, reason in reasons(SAMPLE).items():
        assert f"got {kind} (peft." in reason


@pytest.mark.full
def test_every_kind_of_adapter_of_the_installed_peft_is_refused_by_name() -> None:
    found = reasons(tuple(kinds()))
    assert len(found) > 20
    for kind, reason in found.items():
        assert f"got {kind} (peft." in reason


def test_an_adapter_that_a_caller_derived_from_one_of_peft_is_refused() -> None:
    import peft
    from peft.tuners.lora.layer import Linear

    class Mine(Linear):
        pass

    model = peel(peft.get_peft_model(tiny_hf("llama"), peft.LoraConfig(target_modules=["q_proj"])))  # type: ignore[arg-type]
    refuse_unknown_adapters(model)
    layer: Any = model.get_submodule("model.layers.1.self_attn.q_proj")
    layer.__class__ = Mine
    with pytest.raises(ConfigError, match=r"got .*Mine at model\.layers\.1\.self_attn\.q_proj"):
        refuse_unknown_adapters(model)


def test_adapters_in_a_decoder_of_fsdmoe_are_refused() -> None:
    import peft

    model = nn.Sequential(nn.Linear(4, 4))
    refuse_adapters(model)
    adapted = peel(peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"])))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected a model of transformers, got 0 around a part"):
        refuse_adapters(adapted)
