"""Quantised folders under adapters: codes are taken over where the frozen format holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdmoe.checkpoint import CheckpointError
from fsdmoe.checkpoint.quantised import dequantise, dequantise_int4
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.weights import WeightBuffer
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, run_ranks
from tests.parallel.test_frozen_layers import kept_values
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_peft
SIZES: dict[str, Any] = {
    "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "output_router_logits": False, "num_hidden_layers": 1,
}  # fmt: skip
GROUP = 32


def quantise(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Random codes in place of a folder's projections; the values that they stand for, in float32."""
    random = torch.Generator().manual_seed(0)
    (file,) = folder.glob("*.safetensors")
    tensors, meant = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        start = name.removesuffix(".weight")
        if kind == "fp8":
            codes = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
            scales = torch.rand(rows // 128, columns // 128, generator=random) + 0.1
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            meant[name] = dequantise(codes, scales, (128, 128), torch.float32)
        else:
            shape = (rows, columns // 8)
            codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=random).int()
            scales = (torch.rand(rows, columns // GROUP, generator=random) * 0.1).bfloat16()
            tensors |= {f"{start}.weight_packed": codes, f"{start}.weight_scale": scales}
            tensors[f"{start}.weight_shape"] = torch.tensor([rows, columns])
            meant[name] = dequantise_int4(codes, scales)
    save_file(tensors, file, metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    stated: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if kind == "int4":
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return meant


def values(folder: str, mesh: dict[str, int], frozen: dict[str, Any], *, taken: bool) -> Any:
    """What a model that was loaded from the folder keeps as codes."""
    precision = PrecisionConfig(param_dtype="float32", **frozen)
    opened: list[WeightBuffer] = []
    original = WeightBuffer.open
    WeightBuffer.open = lambda self: (opened.append(self), original(self))[1]  # type: ignore[method-assign]
    try:
        model = build_folder_model(folder, AdapterConfig(rank=4))
        model = parallelize(model, build_meshes(**mesh), ParallelPolicy(precision=precision), load=folder)
    finally:
        WeightBuffer.open = original  # type: ignore[method-assign]
    assert bool(opened) != taken, "values are made where codes cannot be taken over, and only there"
    assert engine_of(model).units
    return kept_values(model)


def as_in_memory(meant: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts fused, as the model has them."""
    found = {name: value for name, value in meant.items() if ".experts." not in name}
    start = "model.layers.0.mlp.experts"
    gate, up, down = (
        [meant[f"{start}.{e}.{each}_proj.weight"] for e in range(8)] for each in ("gate", "up", "down")
    )
    found[f"{start}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
    found[f"{start}.down_proj"] = torch.stack(down)
    return found


@pytest.mark.parametrize(
    ("kind", "frozen", "error"),
    [
        ("fp8", {"frozen_dtype": "float8"}, 0.0),
        ("int4", {"frozen_dtype": "int4", "frozen_block": GROUP}, 0.0),
        pytest.param("int4", {"frozen_dtype": "nf4"}, 0.15, marks=pytest.mark.full),
        pytest.param("fp8", {"frozen_dtype": "int4"}, 0.15, marks=pytest.mark.full),
    ],
)
def test_a_quantised_folder_is_loaded_into_codes(
    tmp_path: Path, kind: str, frozen: dict[str, Any], error: float
) -> None:
    tiny_hf("qwen3_moe", **SIZES).save_pretrained(tmp_path)  # type: ignore[operator]
    meant = as_in_memory(quantise(tmp_path, kind))
    run_mesh = {"ep": 2} if kind == "fp8" else {}
    for got in run_ranks(_values, 2, str(tmp_path), run_mesh, frozen, not error):
        assert got.keys() == meant.keys()
        for name, value in meant.items():
            assert (got[name] - value).norm() <= error * value.norm(), name


def _values(folder: str, mesh: dict[str, int], frozen: dict[str, Any], taken: bool) -> Any:
    return values(folder, mesh, frozen, taken=taken)


def test_other_forms_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    from fsdmoe import checkpoint

    model = tiny_hf("qwen3_moe", **SIZES)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    quantise(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected compressed-tensors in the format pack-quantized"):
        checkpoint.load(tmp_path, model)
