"""Adapters of fused experts, written expert by expert, as servers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError
from fsdmoe.checkpoint.__main__ import main
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import parallelize
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.lora_case import adapted


def save(family: str, folder: str, settings: dict[str, Any]) -> None:
    checkpoint.save(folder, parallelize(adapted(family, **settings), build_meshes(ep=2)))


def products(tensors: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """What each module's factors add to its weight, by its name."""
    return {
        name.removesuffix(".lora_A.weight").removeprefix("base_model.model."): scaling
        * (tensors[name.replace("lora_A", "lora_B")] @ a)
        for name, a in tensors.items()
        if ".lora_A." in name
    }


@requires_peft
@pytest.mark.parametrize(
    ("family", "block", "parts"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        pytest.param("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), marks=pytest.mark.full),
    ],
)
def test_products_of_each_experts_factors_are_those_of_the_stacked_ones(
    tmp_path: Path, family: str, block: str, parts: tuple[str, str, str]
) -> None:
    run_ranks(save, 2, family, str(tmp_path / "checkpoint"), {})
    written = str(tmp_path / "adapter")
    assert main(["to-adapter", str(tmp_path / "checkpoint"), written, "--layout", "per_expert"]) == 0
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj", *parts}
    assert config["target_parameters"] is None
    scaling = config["lora_alpha"] / config["r"]
    got = products(load_file(tmp_path / "adapter/adapter_model.safetensors"), scaling)

    model = adapted(family)
    for number in range(2):
        outer = model.base_model.model.model.layers[number].mlp.experts
        gate_up, down = (layer.get_delta_weight("default") for layer in (outer.base_layer, outer))
        for expert in range(len(down)):
            name = f"model.layers.{number}.{block}.experts.{expert}"
            gate, up = (got.pop(f"{name}.{part}") for part in parts[:2])
            torch.testing.assert_close(torch.cat((gate, up)), gate_up[expert], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(got.pop(f"{name}.{parts[2]}"), down[expert], rtol=1e-6, atol=1e-6)
    assert all("experts" not in name for name in got)
    assert len(got) == 8, "four projections of attention in two layers"


def stack(shapes: dict[str, tuple[int, int]], **config: Any) -> dict[str, Any]:
    """A checkpoint's parts with factors of these shapes, of peft's wrappers (outer or inner)."""
    random = torch.Generator().manual_seed(0)
    base = "layers.0.mlp.experts"
    tensors = {f"{base}{key}.default.weight": torch.randn(n, generator=random) for key, n in shapes.items()}
    return {"model": tensors, "config": config}


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves such parts with what a model would say of itself."""

    def write(folder: Path, parts: dict[str, Any]) -> dict[str, torch.Tensor]:
        from fsdmoe.checkpoint import api

        about = {"hf_config": parts["config"], "adapters": {"default": {"r": 2, "lora_alpha": 2}}}
        monkeypatch.setattr(api, "about_parts", lambda *_: about)
        checkpoint.save(folder, model=parts["model"])
        return parts["model"]

    return write


def test_factors_of_an_older_peft_are_turned_round(tmp_path: Path, described: Any) -> None:
    # [E*Q, out] and [in, Q*E] of gate_up [3, 8, 6] and down [3, 6, 4]
    shapes = {
        ".base_layer.lora_A": (6, 8),
        ".base_layer.lora_B": (6, 6),
        ".lora_A": (6, 6),
        ".lora_B": (4, 6),
    }
    config = {"hidden_size": 6, "moe_intermediate_size": 4, "num_experts": 3, "model_type": "qwen3_moe"}
    stacked = described(tmp_path / "c", stack(shapes, **config))
    checkpoint.to_adapter(tmp_path / "c", tmp_path / "a", layout="per_expert")
    got = products(load_file(tmp_path / "a/adapter_model.safetensors"), 1.0)
    first, second = (stacked[f"layers.0.mlp.experts.base_layer.lora_{x}.default.weight"] for x in "AB")
    for expert in range(3):
        expected = first[2 * expert : 2 * expert + 2].t() @ second[:, expert::3].t()
        ours = [got[f"layers.0.mlp.experts.{expert}.{part}_proj"] for part in ("gate", "up")]
        torch.testing.assert_close(torch.cat(ours), expected)


def test_what_cannot_be_taken_apart_is_refused(tmp_path: Path, described: Any) -> None:
    shapes = {".lora_A": (6, 8), ".lora_B": (8, 6)}
    config = {"hidden_size": 8, "moe_intermediate_size": 4, "num_experts": 3, "model_type": "qwen3_moe"}
    described(tmp_path / "square", stack(shapes, **config))
    with pytest.raises(
        CheckpointError, match="do not tell whose factors these are; leave the layout at peft"
    ):
        checkpoint.to_adapter(tmp_path / "square", tmp_path / "a", layout="per_expert")
    described(tmp_path / "fused", stack(shapes, **config | {"model_type": "gpt_oss"}))
    with pytest.raises(CheckpointError, match="got gpt_oss, whose experts are fused there"):
        checkpoint.to_adapter(tmp_path / "fused", tmp_path / "a", layout="per_expert")
