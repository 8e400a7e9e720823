"""Frozen weights in fp8 under adapters: the model whose weights were rounded beforehand, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint.adapter_names import is_adapter_name, stored_name
from fsdmoe.errors import ConfigError
from fsdmoe.frozen_layers import FROZEN
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.frozen_codes import coded_units
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.quantize import rounded
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.lora_case import adapted, alone, differences, train_steps, wrapped

pytestmark = requires_peft
POLICY = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32", frozen_dtype="float8"))
WIDE = {"hidden_size": 144, "moe_intermediate_size": 40}
"""So that a matrix has several blocks, and the last ones are smaller."""


def is_kept(name: str) -> bool:
    """Whether a parameter is one of those that are kept in fp8."""
    own = stored_name(name)
    return not is_adapter_name(name) and ("_proj" in own)


@torch.no_grad()
def round_base(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_kept(name):
            matrices = parameter.view(-1, *parameter.shape[-2:])
            parameter.copy_(torch.stack([rounded(m, FROZEN) for m in matrices]).view(parameter.shape))


def kept_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole values of everything that is kept as codes."""
    found = {}
    for unit in coded_units(engine_of(model).units):
        for buffer in unit.weights:
            buffer.open()
        found |= {stored_name(name): tensor.full_tensor() for name, tensor in unit.tensors.items()}  # type: ignore[attr-defined]
        for buffer in unit.weights:
            buffer.close(encode=False)
    return found


def life(folder: str, mesh: dict[str, int]) -> dict[str, Any]:
    """A model from a folder, trained, saved and loaded again on this rank."""
    meshes = build_meshes(**mesh)
    adapter = AdapterConfig(rank=3)

    def build() -> nn.Module:
        return parallelize(build_folder_model(f"{folder}/hf", adapter), meshes, POLICY, load=f"{folder}/hf")

    model, found = build(), {}
    held = [
        group.weights for unit in engine_of(model).units for group in unit.groups if group.plan.keeps_codes
    ]
    found["codes"] = {buffer.shard.dtype for buffer in held}  # type: ignore[union-attr]
    found["values"] = kept_values(model)
    train_steps(model, meshes, "sgd", 2)
    checkpoint.save(f"{folder}/checkpoint", model)
    other = build()
    checkpoint.load(f"{folder}/checkpoint", other)
    found["losses"] = [train_steps(m, meshes, "sgd", 2)[0] for m in (model, other)]
    found["values afterwards"] = kept_values(other)
    with pytest.raises(RuntimeError, match=r"kept in fp8 \(precision.frozen_dtype\)"):
        next(p for n, p in model.named_parameters() if is_kept(n)).full_tensor()  # type: ignore[operator]
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with pytest.raises(ConfigError, match=r"merge: expected weights in precision.param_dtype, got frozen"):
        layer.merge()  # type: ignore[operator]
    return found


def test_a_folder_is_read_into_fp8_trained_saved_without_it_and_resumed(tmp_path: Path) -> None:
    base = tiny_hf("qwen3_moe", output_router_logits=False, **WIDE)
    base.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    round_base(base)
    expected = {name: p.detach() for name, p in base.named_parameters() if is_kept(name)}
    for got in run_ranks(life, 2, str(tmp_path), {"ep": 2}):
        assert got["codes"] == {torch.float8_e4m3fn}
        for key in ("values", "values afterwards"):
            assert got[key].keys() == expected.keys()
            for name, value in got[key].items():
                assert torch.equal(value, expected[name]), name
        assert got["losses"][0] == got["losses"][1]
    index = checkpoint.api.open_verified(*checkpoint.storage.split_address(tmp_path / "checkpoint"), "fast")
    assert not [name for name in index.tensors if is_kept(name)]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("world", "mesh"), [(1, {}), (2, {}), (2, {"ep": 2}), (4, {"ep": 2})])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_adapters_learn_as_on_a_base_that_was_rounded_beforehand(
    family: str, world: int, mesh: dict[str, int], optimizer: str
) -> None:
    expected = alone(family, "lora", optimizer, 3, change=round_base)
    plain = alone(family, "lora", optimizer, 3)
    assert differences(plain, expected)["gradients"] > 1e-3, "rounding matters"
    found = differences(expected, run_ranks(wrapped, world, family, "lora", optimizer, 3, mesh, POLICY)[0])
    assert found["gradients"] <= 1e-5
    assert found["losses"] <= 1e-5
    assert found["adapters"] <= (1e-5 if optimizer == "sgd" else 1e-3)


def refusals() -> list[str]:
    found = []
    for model, mesh in ((adapted("qwen3_moe", "dora"), {}), (tiny_hf("qwen3_moe"), {})):
        with pytest.raises(ConfigError) as caught:
            parallelize(model, build_meshes(**mesh), POLICY)
        found.append(str(caught.value))
    return found


def test_what_fp8_does_not_go_with_is_refused() -> None:
    dora, trained = run_ranks(refusals, 1)[0]
    assert "precision.frozen_dtype: DoRA reads the rows of whole weights" in dora
    assert "precision.frozen_dtype: expected frozen projections" in trained
    with pytest.raises(ConfigError, match=r"expected precision.recipe = bf16, got fp8_blockwise"):
        PrecisionConfig(frozen_dtype="float8", recipe="fp8_blockwise", emulate=True)
