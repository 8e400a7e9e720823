"""Values of adapters on the meta device, once the model's own weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import batch, tiny_hf

pytestmark = requires_peft
FAMILY = "deepseek_v3"  # its router has a buffer beside its weight


PROJECTION: dict[str, Any] = {"target_modules": ["o_proj"]}
ALL: dict[str, Any] = {
    "target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head", "mlp.gate"]
}  # fmt: skip


def adapted(settings: dict[str, Any], *, on_meta: bool) -> Any:
    import peft

    config = peft.LoraConfig(r=3, use_dora=True, **settings)
    with torch.device("meta" if on_meta else "cpu"):
        return peft.get_peft_model(tiny_hf(FAMILY, randomized=not on_meta), config)  # type: ignore[arg-type]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(batch(0, 0)).logits


def values(model: Any) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: v.full_tensor() if isinstance(v, ShardedTensor) else v for n, v in named.items()}


def load_into(
    folder: str, settings: dict[str, Any], on_meta: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A folder of weights, or a checkpoint of a model with adapters; logits and values."""
    model = adapted(settings, on_meta=on_meta)
    parallelize(model, build_meshes(ep=2), load=folder)
    return logits_of(model), values(model)


def save_trained(folder: str, settings: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = adapted(settings, on_meta=False)
    for seed, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            random = torch.Generator().manual_seed(seed)
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=random))
    parallelize(model, build_meshes(ep=2))
    checkpoint.save(folder, model)
    return logits_of(model), values(model)


def test_adapters_on_the_meta_device_change_nothing_of_the_weights_that_are_loaded(tmp_path: Path) -> None:
    base = tiny_hf(FAMILY)
    for name, buffer in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(generator=torch.Generator().manual_seed(0))
    base.save_pretrained(tmp_path)  # type: ignore[operator]
    expected = logits_of(base)
    for on_meta in (True, False):  # what is not on the meta device was something else before
        logits, found = run_ranks(load_into, 2, str(tmp_path), ALL, on_meta)[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for name, value in found.items():
            if ".modules_to_save.default." in name:
                wanted = found[name.replace("modules_to_save.default", "original_module")]
                assert torch.equal(value, wanted), name
            if "lora_embedding_B" in name:
                assert 0.5 < value.std() < 2


@pytest.mark.parametrize("settings", [PROJECTION, pytest.param(ALL, marks=pytest.mark.full)])
def test_adapters_on_the_meta_device_take_the_values_of_a_checkpoint_that_has_them(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    logits, wanted = run_ranks(save_trained, 2, str(tmp_path), settings)[0]
    loaded, found = run_ranks(load_into, 2, str(tmp_path), settings, True)[0]
    torch.testing.assert_close(loaded, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, wanted)


def begin(folder: str, settings: dict[str, Any], on_meta: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """What is said of a start from a folder, if anything; the adapter's values."""
    import peft

    with torch.device("meta" if on_meta else "cpu"):
        model: Any = peft.get_peft_model(
            tiny_hf("llama", randomized=not on_meta),  # type: ignore[arg-type]
            peft.LoraConfig(r=4, target_modules=["q_proj"], **settings),
        )
    try:
        parallelize(model, build_meshes(), load=folder)
    except (ConfigError, checkpoint.CheckpointError) as error:
        return str(error), {}
    return "", {name: value for name, value in values(model).items() if "lora_" in name}


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_a_base_that_an_adapter_has_changed_is_not_loaded_over(tmp_path: Path, initial: str) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    said, _ = run_ranks(begin, 1, str(tmp_path), {"init_lora_weights": initial}, False)[0]
    assert f"init_lora_weights = '{initial}'" in said
    assert "leave load= out" in said


@pytest.mark.parametrize("initial", ["orthogonal", False])
def test_adapters_that_cannot_begin_on_the_meta_device_are_refused(tmp_path: Path, initial: Any) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    said, _ = run_ranks(begin, 1, str(tmp_path), {"init_lora_weights": initial}, True)[0]
    assert 'expected True or "gaussian" for adapters on the meta device' in said
    assert repr(initial) in said


def test_a_gaussian_adapter_on_the_meta_device_has_the_deviation_of_its_rank(tmp_path: Path) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    _, found = run_ranks(begin, 1, str(tmp_path), {"init_lora_weights": "gaussian"}, True)[0]
    drawn = torch.cat([value.flatten() for name, value in found.items() if "lora_A" in name])
    assert 0.8 / 4 < drawn.std() < 1.2 / 4
    assert drawn.abs().max() > 0.3, "a normal distribution, no uniform one"


def test_magnitudes_of_new_adapters_follow_weights_that_are_loaded_over_others(tmp_path: Path) -> None:
    base: Any = tiny_hf("llama")
    for parameter in base.parameters():
        parameter.data.mul_(1.5)
    base.save_pretrained(tmp_path)
    _, found = run_ranks(begin, 1, str(tmp_path), {"use_dora": True}, False)[0]
    for index, layer in enumerate(base.model.layers):
        name = f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_magnitude_vector.default.weight"
        torch.testing.assert_close(found[name], layer.self_attn.q_proj.weight.detach().norm(dim=1))
