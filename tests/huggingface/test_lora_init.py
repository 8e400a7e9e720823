"""Values of adapters on the meta device, once the model's own weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import parallelize
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
