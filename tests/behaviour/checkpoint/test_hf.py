"""Hugging Face folders in and out: bitwise, under expert parallelism, and transformers agrees."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DamagedCheckpointError, hf_export
from fsdmoe.checkpoint.hf_config import config_json, model_fields
from fsdmoe.checkpoint.hf_export import ExportPolicy, to_hf
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.models import Decoder, build_model
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_pairs import hf_model, randomize, tiny

ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"]
pytestmark = requires_transformers


def with_quick(*names: str) -> list[Any]:
    """All architectures, those that are not named in the full suite alone."""
    return [pytest.param(a, marks=() if a in names else pytest.mark.full) for a in ARCHITECTURES]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_folder(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


def save_hf(architecture: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    model = hf_model(tiny(architecture, **changes)).to(dtype)
    model.config.dtype = dtype  # type: ignore[union-attr]
    for name, buffer in model.named_buffers():
        # In published checkpoints it is fp32, whatever the weights are.
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    model.save_pretrained(folder, max_shard_size="60KB")  # type: ignore[operator]
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("architecture", with_quick("mixtral", "deepseek_v3"))
def test_a_folder_goes_through_a_checkpoint_and_comes_back_bitwise(tmp_path: Path, architecture: str) -> None:
    import transformers

    save_hf(architecture, tmp_path / "hf", torch.bfloat16)
    from_hf(tmp_path / "hf", tmp_path / "ckpt")
    to_hf(tmp_path / "ckpt", tmp_path / "out", ExportPolicy(shard_bytes=50_000))
    assert_same_folder(tmp_path / "hf", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 2
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("hf", "out")
    )
    assert torch.equal(logits(one), logits(other))


@pytest.mark.parametrize("architecture", with_quick("qwen3_moe", "glm4_moe"))
def test_our_decoder_starts_from_a_folder_and_exports_one_that_transformers_loads(
    tmp_path: Path, architecture: str
) -> None:
    import transformers

    hf = save_hf(architecture, tmp_path / "hf", num_nextn_predict_layers=0)
    ours = Decoder(tiny(architecture))
    checkpoint.load(tmp_path / "hf", ours)
    for name, value in hf.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    checkpoint.save(tmp_path / "ckpt", ours)  # says by itself what model it is
    to_hf(tmp_path / "ckpt", tmp_path / "out")
    assert_same_folder(tmp_path / "hf", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(hf), rtol=1e-6, atol=1e-6)


def round_trip_trained(degrees: dict[str, int], folder: str) -> dict[str, float]:
    """From folders into the shards of a real run, one step at learning rate zero, and back out."""
    meshes, losses = build_meshes(**degrees), {}
    for architecture in ARCHITECTURES:
        path = Path(folder) / architecture
        policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"))
        model = parallelize(build_model(tiny(architecture)), meshes, policy, load=path / "hf")
        optimizer = AdamW(model, lr=0.0, weight_decay=0.1)
        generator = torch.Generator().manual_seed(meshes.rank(Axis.BATCH))
        tokens = torch.randint(0, 96, (2, 9), generator=generator)
        out = model(tokens[:, :-1], labels_BS=tokens[:, 1:])
        out.loss.backward()
        assert clip_grad_norm(model, 1.0).total > 0
        optimizer.step()
        assert any(state["exp_avg"].piece.any() for state in optimizer.state_dict()["state"].values())
        losses[architecture] = out.cross_entropy.item()
        checkpoint.save(path / "ckpt", model, optimizer, meshes=meshes)
        to_hf(path / "ckpt", path / "out", ExportPolicy(shard_bytes=20_000, dtype=torch.bfloat16))
    return losses


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"ep": 2, "etp": 2}, {"dp_outer": 2, "ep": 2}], ids=str)
def test_a_step_of_zero_learning_rate_under_expert_parallelism_changes_nothing(
    tmp_path: Path, degrees: dict[str, int]
) -> None:
    models = {
        name: save_hf(name, tmp_path / name / "hf", torch.bfloat16, num_nextn_predict_layers=0)
        for name in ARCHITECTURES
    }
    losses = run_ranks(round_trip_trained, 4, degrees, str(tmp_path))[0]
    for architecture, model in models.items():
        assert_same_folder(tmp_path / architecture / "hf", tmp_path / architecture / "out")
        tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():  # it was this model that took the step
            wanted = model.float().eval()(tokens[:, :-1]).logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(wanted, tokens[:, 1:].flatten())
        assert losses[architecture] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.full)])
def test_prediction_modules_travel_as_further_layers_with_copies_of_embedding_and_head(
    tmp_path: Path, family: str
) -> None:
    ours = Decoder(tiny(family, num_nextn_predict_layers=1))
    randomize(ours, 0.3)  # memory as it comes may hold NaN, which equals nothing
    checkpoint.save(tmp_path / "ckpt", ours)
    to_hf(tmp_path / "ckpt", tmp_path / "out")
    disk, last = weights(tmp_path / "out"), tiny(family).num_hidden_layers
    assert torch.equal(disk[f"model.layers.{last}.shared_head.head.weight"], disk["lm_head.weight"])
    assert torch.equal(disk[f"model.layers.{last}.embed_tokens.weight"], disk["model.embed_tokens.weight"])
    back = Decoder(tiny(family, num_nextn_predict_layers=1))
    checkpoint.load(tmp_path / "out", back)
    for name, value in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    without = Decoder(tiny(family))  # as transformers does: what it has no use for is passed over
    checkpoint.load(tmp_path / "out", without)
    assert torch.equal(without.lm_head.weight, ours.lm_head.weight)


def test_tied_embeddings_load_whether_the_model_ties_them_or_not(tmp_path: Path) -> None:
    save_hf("qwen3_moe", tmp_path / "hf", tie_word_embeddings=True)
    for tied in (True, False):
        ours = Decoder(tiny("qwen3_moe", tie_word_embeddings=tied))
        checkpoint.load(tmp_path / "hf", ours)
        assert torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)


def quantise(folder: Path, block: int) -> dict[str, torch.Tensor]:
    """Make a folder FP8 with block scales, as DeepSeek-V3 comes; what it stands for."""
    meant = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, weight in list(tensors.items()):
            if not name.endswith("_proj.weight"):
                meant[name] = weight
                continue
            rows, columns = weight.shape
            scale = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[name.removesuffix(".weight") + ".weight_scale_inv"] = scale
            spread = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
            meant[name] = (tensors[name].float() * spread).bfloat16()
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(
            json.dumps(
                {"weight_map": {n: f.name for f in folder.glob("*.safetensors") for n in load_file(f)}}
            )
        )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_fp8_with_block_scales_is_dequantised_on_import_and_when_loaded(tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path / "hf", torch.bfloat16, num_nextn_predict_layers=0)
    meant = quantise(tmp_path / "hf", 10)
    directly, converted = Decoder(tiny("deepseek_v3")).bfloat16(), Decoder(tiny("deepseek_v3")).bfloat16()
    checkpoint.load(tmp_path / "hf", directly)
    from_hf(tmp_path / "hf", tmp_path / "ckpt")
    checkpoint.load(tmp_path / "ckpt", converted)
    for name, value in converted.state_dict().items():
        assert torch.equal(directly.state_dict()[name], value), name
    to_hf(tmp_path / "ckpt", tmp_path / "out")
    got = weights(tmp_path / "out")
    assert got.keys() == meant.keys()
    for name, value in meant.items():
        assert torch.equal(got[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize(
    "architecture",
    with_quick("mixtral", "deepseek_v3"),  # the other names are a part of these
)
def test_an_fp8_export_has_codes_and_scales_of_all_projections_and_comes_back(
    tmp_path: Path,
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantised: list[torch.Tensor] = []
    original = hf_export.quantise
    monkeypatch.setattr(hf_export, "quantise", lambda values: quantised.append(values) or original(values))
    save_hf(architecture, tmp_path / "hf", torch.bfloat16, hidden_size=160)
    from_hf(tmp_path / "hf", tmp_path / "ckpt")
    to_hf(tmp_path / "ckpt", tmp_path / "fp8", ExportPolicy(fp8=True, shard_bytes=50_000))
    assert "no multiples of 128" in caplog.text
    plain, found = weights(tmp_path / "hf"), weights(tmp_path / "fp8")
    codes = {name for name, value in found.items() if value.dtype == torch.float8_e4m3fn}
    assert len(quantised) == len(codes), "once for codes and scales"
    leaves = {name.rpartition(".")[0].rpartition(".")[2] for name in plain if name.endswith("proj.weight")}
    leaves |= {"kv_a_proj_with_mqa"} if architecture == "deepseek_v3" else set()
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in codes} == leaves | (
        {"w1", "w2", "w3"} if architecture == "mixtral" else set()
    )
    assert set(found) == set(plain) | {name.removesuffix(".weight") + ".weight_scale_inv" for name in codes}
    for name, value in plain.items():
        if name not in codes:
            assert torch.equal(found[name], value), name
            continue
        scales = found[name.removesuffix(".weight") + ".weight_scale_inv"]
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(value), : value.shape[1]]
        restored = found[name].float() * spread
        assert ((restored - value.float()).norm() / value.float().norm()) < 0.04, name
        assert (restored - value.float()).abs().max() <= value.float().abs().max() / 16
    stated = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["weight_block_size"]) == ("fp8", [128, 128])
    from_hf(tmp_path / "fp8", tmp_path / "again")
    to_hf(tmp_path / "again", tmp_path / "back", ExportPolicy(dtype=torch.float32))
    for name, value in weights(tmp_path / "back").items():
        assert ((value - plain[name].float()).norm() / plain[name].float().norm()) < 0.04, name


@pytest.mark.parametrize("architecture", with_quick("deepseek_v3"))
def test_transformers_reads_an_fp8_export_as_we_do_where_all_blocks_are_whole(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    save_hf(architecture, tmp_path / "hf", torch.bfloat16, hidden_size=128)
    from_hf(tmp_path / "hf", tmp_path / "ckpt")
    to_hf(tmp_path / "ckpt", tmp_path / "fp8", ExportPolicy(fp8=True))
    assert "no multiples of 128" not in caplog.text
    from_hf(tmp_path / "fp8", tmp_path / "again")
    to_hf(tmp_path / "again", tmp_path / "plain", ExportPolicy(dtype=torch.bfloat16))
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, expected = (load(tmp_path / n, dtype=torch.bfloat16).state_dict() for n in ("fp8", "plain"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["mxfp4", "gptq"])
def test_other_quantised_formats_are_refused(tmp_path: Path, kind: str) -> None:
    save_hf("qwen3_moe", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": kind}})
    )
    for act in (
        lambda: from_hf(tmp_path / "hf", tmp_path / "x"),
        lambda: checkpoint.load(tmp_path / "hf", Decoder(tiny("qwen3_moe"))),
    ):
        with pytest.raises(CheckpointError, match=rf"quantised \({kind}\)"):
            act()


def test_damaged_folders_are_refused_by_file(tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path / "hf", num_nextn_predict_layers=0)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1
    data = files[0].read_bytes()
    for broken in (data[:-1], data[:4], b"", b"\xff" * 100, data + b"x"):
        files[0].write_bytes(broken)
        with pytest.raises(DamagedCheckpointError, match=files[0].name):
            checkpoint.load(tmp_path / "hf", Decoder(tiny("deepseek_v3")))
    files[0].unlink()
    with pytest.raises(DamagedCheckpointError, match="missing"):
        from_hf(tmp_path / "hf", tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_a_missing_expert_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    save_hf("qwen3_moe", tmp_path / "hf")
    gone, index = "model.layers.0.mlp.experts.3.up_proj.weight", tmp_path / "hf/model.safetensors.index.json"
    listed = json.loads(index.read_text())
    file = tmp_path / "hf" / listed["weight_map"].pop(gone)
    tensors = load_file(file)
    del tensors[gone]
    save_file(tensors, file)
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj.*experts missing"):
        from_hf(tmp_path / "hf", tmp_path / "ckpt")


def test_an_existing_folder_is_never_replaced_by_an_export(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", Decoder(tiny("qwen3_moe")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="with other files, which are not replaced"):
        to_hf(tmp_path / "ckpt", tmp_path / "out")
    with pytest.raises(CheckpointError, match="with other files, which are not replaced"):
        checkpoint.save(tmp_path / "out", Decoder(tiny("qwen3_moe")))
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_oss"])
def test_configurations_say_the_same_in_both_directions(architecture: str) -> None:
    config = tiny(architecture)
    fields = model_fields(config_json(dataclasses.asdict(config)))
    assert len(fields) > 12
    for key, value in fields.items():
        assert getattr(config, key) == value, key
