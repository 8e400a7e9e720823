"""Frozen weights as codes under adapters: the model whose weights were rounded beforehand, on any mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import api, storage
from fsdmoe.checkpoint.adapter_names import is_adapter_name, stored_name
from fsdmoe.checkpoint.course import COURSE
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.parts import refuse_codes
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.frozen_codes import coded_units
from fsdmoe.huggingface.accelerator import whole_weights
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.refit import iterate_weights
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.parallel.frozen_layers import coding_of
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.four_bit import FourBit, decode, encode
from fsdmoe.precision.quantize import rounded
from fsdmoe.testing import requires_peft, run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_hf_run import config_for, folder_of
from tests.support.hf_tiny import tiny_hf
from tests.support.lora_case import adapted, alone, differences, train_steps, wrapped

pytestmark = requires_peft
PRECISION = {
    "float8": PrecisionConfig(param_dtype="float32", frozen_dtype="float8"),
    "nf4": PrecisionConfig(param_dtype="float32", frozen_dtype="nf4"),
    "int4": PrecisionConfig(param_dtype="float32", frozen_dtype="int4", frozen_block=32),
}
WIDE = {
    "float8": {"hidden_size": 144, "moe_intermediate_size": 40},
    "nf4": {"hidden_size": 128, "moe_intermediate_size": 64},
    "int4": {"hidden_size": 96, "moe_intermediate_size": 40},
}
"""So that a matrix has several blocks. In fp8 the last ones are smaller; in int4 the experts' down projection
has no whole blocks, so it stays as it is."""
STORED = {"float8": torch.float8_e4m3fn, "nf4": torch.uint8, "int4": torch.uint8}


def is_kept(name: str, parameter: torch.Tensor, block: int = 1) -> bool:
    """Whether a parameter is one of those that are kept as codes."""
    return not is_adapter_name(name) and "_proj" in stored_name(name) and parameter.shape[-1] % block == 0


@torch.no_grad()
def round_base(model: nn.Module, precision: PrecisionConfig = PRECISION["float8"]) -> None:
    scaling = coding_of(precision).scaling
    for name, parameter in model.named_parameters():
        if not is_kept(name, parameter, precision.four_bit_block or 1):
            continue
        if isinstance(scaling, FourBit):
            flat = parameter.detach().view(-1)
            codes = torch.empty(flat.numel() // 2, dtype=torch.uint8)
            factors = torch.empty(scaling.factor_numel(flat.numel()), dtype=torch.bfloat16)
            encode(flat.clone(), scaling, codes, factors)
            decode(codes, factors, scaling, flat)
        else:
            matrices = parameter.view(-1, *parameter.shape[-2:])
            parameter.copy_(torch.stack([rounded(m, scaling) for m in matrices]).view(parameter.shape))


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


def life(folder: str, mesh: dict[str, int], dtype: str) -> dict[str, Any]:
    """A model from a folder, trained, saved and loaded again on this rank."""
    meshes = build_meshes(**mesh)
    policy = ParallelPolicy(precision=PRECISION[dtype])
    adapter = AdapterConfig(rank=3)

    def build(base: str = "hf", policy: ParallelPolicy = policy) -> nn.Module:
        source = f"{folder}/{base}"
        return parallelize(build_folder_model(source, adapter), meshes, policy, load=source)

    model, found = build(), {}
    held = [
        group.weights for unit in engine_of(model).units for group in unit.groups if group.plan.keeps_codes
    ]
    found["codes"] = {buffer.shard.dtype for buffer in held}  # type: ignore[union-attr]
    found["values"] = kept_values(model)
    rounded = build("rounded", ParallelPolicy(precision=PrecisionConfig(param_dtype="float32")))
    found["steps"] = [train_steps(m, meshes, "sgd", 2) for m in (rounded, model)]
    checkpoint.save(f"{folder}/checkpoint", model)
    other = build()
    checkpoint.load(f"{folder}/checkpoint", other)
    found["losses"] = [train_steps(m, meshes, "sgd", 2)[0] for m in (model, other)]
    found["values afterwards"] = kept_values(other)
    with pytest.raises(RuntimeError, match=r"kept in codes \(precision.frozen_dtype\)"):
        next(p for n, p in model.named_parameters() if is_kept(n, p)).full_tensor()  # type: ignore[operator]
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with pytest.raises(ConfigError, match=r"merge: expected weights in precision.param_dtype, got frozen"):
        layer.merge()  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"frozen_dtype: expected none for a model that is saved whole"):
        refuse_codes(model, "is saved whole")
    checkpoint.save(f"{folder}/whole", rounded)
    settings = checkpoint.CheckpointConfig(load=f"{folder}/whole", load_only_model=True)
    with pytest.raises(CheckpointError, match=r"once resumed it would go on with those of model\.hf"):
        checkpoint.Checkpointer(settings, f"{folder}/run").load({"model": other})
    checkpoint.Checkpointer(checkpoint.CheckpointConfig(asynchronous=False), f"{folder}/tuned").save(
        1, {"model": rounded}
    )
    settings = checkpoint.CheckpointConfig(load="latest", load_only_model=True)
    with pytest.raises(CheckpointError, match=r"once resumed it would go on with those of model\.hf"):
        checkpoint.Checkpointer(settings, f"{folder}/tuned").load({"model": other})
    return found


@pytest.mark.parametrize(
    ("dtype", "mesh"),
    [
        ("float8", {"ep": 2}),
        pytest.param("nf4", {"ep": 2}, marks=pytest.mark.full),
        pytest.param("nf4", {}, marks=pytest.mark.full),
        pytest.param("int4", {}, marks=pytest.mark.full),
    ],
)
def test_a_folder_is_read_into_codes_trained_saved_without_them_and_resumed(
    tmp_path: Path, dtype: str, mesh: dict[str, int]
) -> None:
    base = tiny_hf("qwen3_moe", output_router_logits=False, num_hidden_layers=1, **WIDE[dtype])
    base.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    precision = PRECISION[dtype]
    round_base(base, precision)
    base.save_pretrained(tmp_path / "rounded")  # type: ignore[operator]
    block = precision.four_bit_block or 1
    expected = {name: p.detach() for name, p in base.named_parameters() if is_kept(name, p, block)}
    assert len(expected) > 3
    for got in run_ranks(life, 2, str(tmp_path), mesh, dtype):
        assert got["codes"] == {STORED[dtype]}
        for key in ("values", "values afterwards"):
            assert got[key].keys() == expected.keys()
            for name, value in got[key].items():
                assert torch.equal(value, expected[name]), name
        assert got["losses"][0] == got["losses"][1]
        assert max(differences(*got["steps"]).values()) <= 1e-5
    index = api.open_verified(*storage.split_address(tmp_path / "checkpoint"), "fast")
    assert not expected.keys() & {name.partition("/")[2] for name in index.tensors}


def started_from_whole_weights(hf: str, folder: str) -> tuple[bool, int]:
    """Whether a run that keeps codes notes where it began, and the step that an evaluation finds."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = "somewhere"  # as of a launcher, whose starts are noted
    settings = {"train__output_dir": folder, "adapter__rank": 3, "checkpoint__interval": 0}
    config = config_for(hf, 1, **settings)
    meshes = build_meshes(config.mesh)
    run = Run(config, meshes)
    run.progress["step"] = 1
    run.checkpoints.save(1, run.state())
    run.checkpoints.close()
    run.close("stopped")
    load = f"{folder}/checkpoints/step_00000001"
    config = config_for(hf, 1, **settings, precision__frozen_dtype="float8", checkpoint__load=load)
    with pytest.raises(CheckpointError, match=r"once resumed it would go on with those of model\.hf"):
        Run(config, meshes)
    is_noted = (Path(folder) / COURSE).exists()
    evaluation = Run(config, meshes, trains=False)
    evaluation.close("evaluated")
    return is_noted, evaluation.progress["step"]


def test_a_checkpoint_with_the_weights_is_for_evaluations_and_refused_before_a_run_notes_it(
    tmp_path: Path,
) -> None:
    hf = folder_of(tmp_path)
    found = run_ranks(started_from_whole_weights, 1, str(hf), str(tmp_path / "run"), fresh=True)
    assert found == [(False, 1)]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("world", "mesh"), [(1, {}), (2, {}), (2, {"ep": 2}), (4, {"ep": 2})])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_adapters_learn_as_on_a_base_that_was_rounded_beforehand(
    family: str, world: int, mesh: dict[str, int], optimizer: str
) -> None:
    policy = ParallelPolicy(precision=PRECISION["float8"])
    expected = alone(family, "lora", optimizer, 3, change=round_base)
    plain = alone(family, "lora", optimizer, 3)
    assert differences(plain, expected)["gradients"] > 1e-3, "rounding matters"
    found = differences(expected, run_ranks(wrapped, world, family, "lora", optimizer, 3, mesh, policy)[0])
    assert found["gradients"] <= 1e-5
    assert found["losses"] <= 1e-5
    assert found["adapters"] <= (1e-5 if optimizer == "sgd" else 1e-3)


RECIPE: dict[str, Any] = {"param_dtype": "float32", "recipe": "fp8_blockwise", "emulate": True}


def sent_and_saved() -> None:
    model = tiny_hf("qwen3_moe", num_hidden_layers=1, **WIDE["float8"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    parallelize(model, build_meshes(ep=2), ParallelPolicy(precision=PRECISION["float8"]))
    with pytest.raises(ConfigError, match=r"expected none for a model that is sent, got .* more in codes"):
        next(iterate_weights(model))
    with pytest.raises(ConfigError, match=r"expected none for a model that is saved whole, got .* more in"):
        whole_weights(model, keep=True)


def test_a_model_with_codes_is_not_sent_or_saved_without_them() -> None:
    run_ranks(sent_and_saved, 2)


def by_recipe(mesh: dict[str, int]) -> list[Any]:
    """Steps by a recipe on codes, by it on a base that was rounded beforehand, and on decoded codes."""
    meshes = build_meshes(**mesh)
    model = adapted("qwen3_moe")
    round_base(model)
    parallelize(model, meshes, ParallelPolicy(precision=PrecisionConfig(**RECIPE)))
    codes = ParallelPolicy(precision=PrecisionConfig(frozen_dtype="float8", **RECIPE))
    decoded = ParallelPolicy(precision=PRECISION["float8"])
    return [
        wrapped("qwen3_moe", "lora", "sgd", 2, mesh, codes),
        train_steps(model, meshes, "sgd", 2),
        wrapped("qwen3_moe", "lora", "sgd", 2, mesh, decoded),
    ]


@pytest.mark.parametrize(("world", "mesh"), [(1, {}), pytest.param(2, {"ep": 2}, marks=pytest.mark.full)])
def test_products_of_a_recipe_take_frozen_codes(world: int, mesh: dict[str, int]) -> None:
    found, rounded_beforehand, decoded = run_ranks(by_recipe, world, mesh)[0]
    assert max(differences(rounded_beforehand, found).values()) <= 1e-5
    assert differences(decoded, found)["gradients"] > 1e-3, "rows are rounded too"
    assert differences(decoded, found)["losses"] < 0.02


def refusals() -> list[str]:
    found = []
    for model, mesh in ((adapted("qwen3_moe", "dora"), {}), (tiny_hf("qwen3_moe"), {})):
        with pytest.raises(ConfigError) as caught:
            parallelize(model, build_meshes(**mesh), ParallelPolicy(precision=PRECISION["float8"]))
        found.append(str(caught.value))
    return found


def test_what_codes_do_not_go_with_is_refused() -> None:
    dora, trained = run_ranks(refusals, 1)[0]
    assert "precision.frozen_dtype: DoRA reads the rows of whole weights" in dora
    assert "precision.frozen_dtype: expected frozen projections" in trained
    with pytest.raises(ConfigError, match=r"expected precision.recipe = fp8_blockwise.* got mxfp8"):
        PrecisionConfig(frozen_dtype="float8", recipe="mxfp8", emulate=True)
    with pytest.raises(
        ConfigError, match=r'expected "float8" with precision.recipe = fp8_blockwise, got nf4'
    ):
        PrecisionConfig(frozen_dtype="nf4", recipe="fp8_blockwise", emulate=True)
    with pytest.raises(ConfigError, match=r"precision.frozen_block: expected precision.frozen_dtype = "):
        PrecisionConfig(frozen_dtype="float8", frozen_block=64)
    with pytest.raises(ConfigError, match=r"precision.frozen_block: expected one of 32, 64"):
        PrecisionConfig(frozen_dtype="nf4", frozen_block=48)
