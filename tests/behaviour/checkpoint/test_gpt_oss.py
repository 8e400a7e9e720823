"""gpt-oss between its folders and our decoder, whose experts are laid out otherwise: bitwise both ways, equal
to transformers, and MXFP4 as the numbers that it stands for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError
from fsdmoe.checkpoint.hf_export import ExportPolicy, to_hf
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.models import Decoder
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import hf_model, in_native_names, randomize, tiny

pytestmark = requires_transformers


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: value for file in sorted(folder.glob("*.safetensors")) for n, value in load_file(file).items()}


def save_hf(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "60KB") -> nn.Module:
    model = hf_model(tiny("gpt_oss")).to(dtype)
    model.config.dtype = dtype  # type: ignore[union-attr]
    model.save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return model


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def test_a_folder_comes_back_bitwise_and_trains_as_in_transformers(tmp_path: Path) -> None:
    theirs = save_hf(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ckpt")
    ours = Decoder(tiny("gpt_oss"))
    checkpoint.load(tmp_path / "ckpt", ours)
    checkpoint.save(tmp_path / "own", ours)  # says by itself what model it is
    for source in ("ckpt", "own"):
        to_hf(tmp_path / source, tmp_path / f"{source}-out", ExportPolicy(shard_bytes=50_000))
        assert_same(weights(tmp_path / f"{source}-out"), weights(tmp_path / "hf"))
    tokens = torch.randint(0, 96, (2, 41), generator=torch.Generator().manual_seed(3))
    out = theirs(tokens[:, :-1]).logits
    found = ours(tokens[:, :-1]).logits_BSV
    assert (found - out).abs().max() <= 1e-5 * out.abs().max()
    nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    ours(tokens[:, :-1], labels_BS=tokens[:, 1:]).loss.backward()
    wanted = in_native_names({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    for name, parameter in ours.named_parameters():
        assert wanted[name].abs().max() > 0, name
        assert (parameter.grad - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name  # type: ignore[operator]


def test_transformers_loads_what_an_untrained_decoder_exports(tmp_path: Path) -> None:
    import transformers

    kinds = ("full_attention", "sliding_attention", "sliding_attention")
    ours = Decoder(tiny("gpt_oss", num_hidden_layers=3, layer_types=kinds, sliding_window=5)).eval()
    randomize(ours, 0.3)
    checkpoint.save(tmp_path / "ckpt", ours)
    to_hf(tmp_path / "ckpt", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours(tokens).logits_BSV
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_neither_layout_of_the_experts_is_taken_for_the_other(tmp_path: Path) -> None:
    theirs = save_hf(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "native")
    from_hf(tmp_path / "hf", tmp_path / "wrapped", for_transformers=True)
    for source in ("hf", "wrapped"):
        with pytest.raises(CheckpointError, match=r"laid out as transformers has them.*from-hf"):
            checkpoint.load(tmp_path / source, Decoder(tiny("gpt_oss")))
    with pytest.raises(CheckpointError, match=r"laid out as the native decoder has them.*to-hf"):
        checkpoint.load(tmp_path / "native", theirs)
    checkpoint.load(tmp_path / "wrapped", theirs)
    to_hf(tmp_path / "wrapped", tmp_path / "out")
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "hf"))


def pack(folder: Path) -> dict[str, torch.Tensor]:
    """Make a folder of one file MXFP4, as gpt-oss comes; what transformers takes it for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file, generator, meant = folder / "model.safetensors", torch.Generator().manual_seed(5), {}
    tensors = load_file(file)
    for name, value in list(tensors.items()):
        meant[name] = value
        if name.endswith((".gate_up_proj", ".down_proj")):
            experts, inner, outer = tensors.pop(name).shape
            shape = (experts, outer, inner // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    return meant


def test_mxfp4_is_dequantised_on_import_and_when_a_wrapped_model_loads_it(tmp_path: Path) -> None:
    model = hf_model(tiny("gpt_oss", moe_intermediate_size=64)).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16  # type: ignore[union-attr]
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    meant = pack(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="its experts are laid out as transformers has them"):
        checkpoint.load(tmp_path / "hf", Decoder(tiny("gpt_oss", moe_intermediate_size=64)))
    checkpoint.load(tmp_path / "hf", model)
    assert_same(dict(model.state_dict()), meant)
    for for_transformers in (False, True):
        called = f"ckpt-{for_transformers}"
        from_hf(tmp_path / "hf", tmp_path / called, for_transformers=for_transformers)
        to_hf(tmp_path / called, tmp_path / f"{called}-out")
        assert_same(weights(tmp_path / f"{called}-out"), meant)
        assert "quantization_config" not in json.loads((tmp_path / f"{called}-out/config.json").read_text())
    checkpoint.load(tmp_path / "ckpt-False", Decoder(tiny("gpt_oss", moe_intermediate_size=64)))


@pytest.mark.parametrize(
    ("lost", "message"),
    [("_scales", r"down_proj_scales: expected bytes of MXFP4 \(U8\), got nothing"), ("all", "no \\*_blocks")],
)
def test_half_of_an_mxfp4_weight_is_refused(tmp_path: Path, lost: str, message: str) -> None:
    hf_model(tiny("gpt_oss", moe_intermediate_size=64)).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    pack(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    gone = ("_scales", "_blocks") if lost == "all" else (f"down_proj{lost}",)
    save_file({n: t for n, t in load_file(file).items() if not n.endswith(gone)}, file)
    with pytest.raises(CheckpointError, match=message):
        from_hf(tmp_path / "hf", tmp_path / "ckpt")
