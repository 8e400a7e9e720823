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
from fsdmoe.testing import requires_peft
from tests.support.lora_case import adapted
from tests.support.server_adapters import SERVED, sglang_updates, vllm_updates


def products(tensors: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """What each module's factors add to its weight, by its name."""
    return {
        name.removesuffix(".lora_A.weight").removeprefix("base_model.model."): scaling
        * (tensors[name.replace("lora_A", "lora_B")] @ a)
        for name, a in tensors.items()
        if ".lora_A." in name
    }


def exported(model: Any, folder: Path, layout: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The two files of the model's adapter."""
    saved, written = folder / layout / "checkpoint", folder / layout / "adapter"
    checkpoint.save(saved, model)
    assert main(["to-adapter", str(saved), str(written), "--layout", layout]) == 0
    config = json.loads((written / "adapter_config.json").read_text())
    return load_file(written / "adapter_model.safetensors"), config


def updates_of_experts(model: Any, prefix: str) -> dict[str, torch.Tensor]:
    """What peft adds to the experts' weights, outputs before inputs. ``prefix``: of a layer's number."""
    found = {}
    for number, layer in enumerate(model.base_model.model.model.layers):
        outer = getattr(layer.mlp, "experts", None)
        if outer is None:
            continue
        for name, wrapper in (("gate_up", outer.base_layer), ("down", outer)):
            update = wrapper.get_delta_weight("default").detach()
            is_swapped = getattr(outer.get_base_layer(), "is_transposed", False)
            found[f"{prefix.format(number)}.{name}"] = update.mT if is_swapped else update
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, update in expected.items():
        torch.testing.assert_close(got[name], update, rtol=1e-5, atol=1e-6, msg=name)


def num_experts(model: Any) -> int:
    return len(model.base_model.model.model.layers[-1].mlp.experts.get_delta_weight("default"))


@requires_peft
@pytest.mark.parametrize("family", SERVED)
def test_servers_add_what_peft_does_to_every_expert(tmp_path: Path, family: str) -> None:
    model, served = adapted(family, use_rslora=True), SERVED[family]
    count = num_experts(model)
    files = exported(model, tmp_path, "per_expert")
    assert_same(sglang_updates(served, *files, count), updates_of_experts(model, "layers.{}"))
    files = exported(model, tmp_path, "peft") if served.is_3d else files
    got = vllm_updates(served, *files, count)
    attention = {name: got.pop(name) for name in list(got) if ".self_attn." in name}
    assert_same(got, updates_of_experts(model, f"model.layers.{{}}.{served.block}.experts"))
    inner = model.base_model.model
    assert_same(
        attention,
        {
            name: inner.get_submodule(name).get_delta_weight("default").detach()
            for name, module in inner.named_modules()
            if ".self_attn." in name and hasattr(module, "get_delta_weight")
        },
    )


@requires_peft
def test_an_earlier_adapter_is_replaced_on_request_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(adapted("qwen3_moe"), tmp_path, "peft")
    words = ["to-adapter", str(tmp_path / "peft/checkpoint"), str(tmp_path / "peft/adapter")]
    assert main(words) == 1
    assert "got an adapter that is there; --replace writes the new one" in capsys.readouterr().err
    (tmp_path / "peft/adapter/adapter_model.safetensors").unlink()
    assert main([*words, "--replace"]) == 0
    assert (tmp_path / "peft/adapter/adapter_model.safetensors").exists()


@requires_peft
def test_projections_without_an_adapter_get_zeros_because_vllm_wants_all_three(tmp_path: Path) -> None:
    model = adapted("qwen3_moe", target_parameters=["mlp.experts.down_proj"])
    got = vllm_updates(SERVED["qwen3_moe"], *exported(model, tmp_path, "per_expert"), 8)
    for number, layer in enumerate(model.base_model.model.model.layers):
        experts = f"model.layers.{number}.mlp.experts"
        assert not got[f"{experts}.gate_up"].any()
        expected = layer.mlp.experts.get_delta_weight("default").detach()
        torch.testing.assert_close(got[f"{experts}.down"], expected, rtol=1e-5, atol=1e-6)


@requires_peft
def test_ranks_and_alphas_by_pattern_become_one_rank_and_one_alpha(tmp_path: Path) -> None:
    # as peft makes them of target_modules="all-linear"
    patterns: dict[str, Any] = {
        "rank_pattern": {r".*\.gate_up_proj": 6},
        "alpha_pattern": {"q_proj": 9, "down_proj": 2},
    }
    model = adapted("qwen3_moe", **patterns)
    tensors, config = exported(model, tmp_path, "per_expert")
    assert {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name} == {6}
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (6, {}, {})
    got = sglang_updates(SERVED["qwen3_moe"], tensors, config, 8)
    assert_same(got, updates_of_experts(model, "layers.{}"))
    q_proj = model.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight("default").detach()
    got = vllm_updates(SERVED["qwen3_moe"], tensors, config, 8)
    torch.testing.assert_close(got["model.layers.0.self_attn.q_proj"], q_proj, rtol=1e-5, atol=1e-6)


@requires_peft
def test_other_modules_have_their_names_in_the_models_folder(tmp_path: Path) -> None:
    model = adapted("mixtral", target_parameters=["mlp.gate.weight"])
    got = vllm_updates(SERVED["mixtral"], *exported(model, tmp_path, "per_expert"), 4)
    router = model.base_model.model.model.layers[0].mlp.gate.get_delta_weight("default").detach()
    torch.testing.assert_close(got["model.layers.0.block_sparse_moe.gate"], router, rtol=1e-5, atol=1e-6)


@requires_peft
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, r"got modules_to_save = \['lm_head'\]; merge the adapter"),
        ({"use_dora": True, "target_parameters": None}, "got use_dora = True"),
        ({"bias": "all"}, "got bias = all"),
    ],
    ids=lambda each: str(list(each))[:20] if isinstance(each, dict) else "",
)
def test_what_servers_do_not_read_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    checkpoint.save(tmp_path / "checkpoint", adapted("qwen3_moe", **settings))
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.to_adapter(tmp_path / "checkpoint", tmp_path / "adapter", layout="per_expert")


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


@requires_peft
def test_experts_that_are_fused_in_the_folder_are_refused(tmp_path: Path) -> None:
    parameters = [f"block_sparse_moe.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    checkpoint.save(tmp_path / "checkpoint", adapted("granite_shared", target_parameters=parameters))
    with pytest.raises(CheckpointError, match="got granitemoeshared, whose experts are fused there"):
        checkpoint.to_adapter(tmp_path / "checkpoint", tmp_path / "adapter", layout="per_expert")
