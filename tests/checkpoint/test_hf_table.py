"""Names on disk come from transformers' own table, and every export is compared with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, ExportPolicy, from_hf, to_hf
from fsdmoe.checkpoint.disk_names import disk_names
from fsdmoe.checkpoint.hf_held import CLASSES
from fsdmoe.testing import requires_transformers
from tests.support.moe_families import VOCABULARY, tiny_config, tiny_model

pytestmark = requires_transformers


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


@pytest.mark.parametrize("family", CLASSES)
def test_the_table_of_a_native_family_is_that_of_transformers(family: str) -> None:
    from fsdmoe.checkpoint.hf_table import build_names

    config = tiny_config(family).to_dict()
    ours, theirs = disk_names(config), build_names(config)
    assert type(ours) is not type(theirs)
    for name, value in tiny_model(family).state_dict().items():
        shape = tuple(value.shape)
        pieces = theirs.to_disk(name, shape)
        assert sorted(ours.to_disk(name, shape), key=str) == sorted(pieces, key=str)
        for piece in pieces:
            assert ours.from_disk(piece.disk, piece.disk_shape) == piece
            assert theirs.from_disk(piece.disk, piece.disk_shape) == piece


def test_a_checkpoint_of_other_weights_than_its_configuration_says_is_not_exported(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint", tiny_model("qwen3_moe"))
    config = tiny_config("qwen3_moe", num_hidden_layers=3, head_dim=16).to_dict()
    with pytest.raises(CheckpointError) as caught:
        to_hf(tmp_path / "checkpoint", tmp_path / "out", ExportPolicy(config=json.loads(json.dumps(config))))
    assert "cannot be exported as qwen3_moe, because transformers expects other weights" in str(caught.value)
    assert "model.layers.0.self_attn.q_proj.weight: expected (64, 32), got (32, 32)" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_family_that_transformers_does_not_know_is_not_exported(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint", tiny_model("olmoe"))
    config: dict[str, Any] = {"model_type": "my_moe"}
    with pytest.raises(
        CheckpointError, match=r"knows no 'my_moe', so the names of its weights on disk are not"
    ):
        to_hf(tmp_path / "checkpoint", tmp_path / "out", ExportPolicy(config=config))


def test_joined_and_interleaved_weights_keep_their_names_and_are_not_read_from_another_form(
    tmp_path: Path,
) -> None:
    """inkling has gate and up of a dense layer in one tensor on disk, row by row in turns."""
    from fsdmoe.checkpoint.hf_table import TransformersNames

    names = TransformersNames(tiny_model("inkling_text"))
    shape = (8, 32, 32)
    (piece,) = names.to_disk("model.layers.1.mlp.experts.gate_up_proj", shape)
    assert (piece.disk, piece.disk_shape) == ("model.layers.1.mlp.experts.gate_up_proj", shape)


def test_an_old_spelling_of_a_name_is_found_as_transformers_finds_it(tmp_path: Path) -> None:
    """A folder in the names of memory, as save_pretrained(save_original_format=False) writes it."""
    model = tiny_model("phimoe")
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "hf/model.safetensors")
    other = tiny_model("phimoe", seed=1)
    checkpoint.load(tmp_path / "hf", other)
    torch.testing.assert_close(logits(other), logits(model), atol=0, rtol=0)


def test_a_missing_expert_of_a_wrapped_family_is_noticed(tmp_path: Path) -> None:
    tiny_model("phimoe").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.gate_up_proj.*are experts missing"):
        checkpoint.load(tmp_path / "hf", tiny_model("phimoe"))


def test_a_folder_of_a_wrapped_family_goes_through_a_checkpoint_and_back(tmp_path: Path) -> None:
    """bailing_hybrid joins three convolutions in memory, a box of which does not begin at zero."""
    from transformers import CONFIG_MAPPING

    if "bailing_hybrid" not in CONFIG_MAPPING:
        pytest.skip("the installed transformers has no such family")
    model = tiny_model("bailing_hybrid")
    model.save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_a_head_of_its_own_is_kept_whatever_the_configuration_says(family: str, tmp_path: Path) -> None:
    """As in transformers: a tied pair is one parameter unless both are in the folder and differ."""
    from transformers import AutoModelForCausalLM

    tiny_model(family).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", experts_implementation="eager")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    wanted = logits(model)

    torch.nn.init.zeros_(model.lm_head.weight)
    checkpoint.load(tmp_path / "hf", model)
    torch.testing.assert_close(logits(model), wanted, atol=0, rtol=0)
    one = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and .* set tie_word_embeddings = false"):
        checkpoint.load(tmp_path / "hf", one)

    checkpoint.save(tmp_path / "saved", model)
    from_hf(tmp_path / "hf", tmp_path / "converted")
    for source in ("saved", "converted"):
        to_hf(tmp_path / source, tmp_path / f"{source}_hf")
        stated = json.loads((tmp_path / f"{source}_hf/config.json").read_text())
        assert stated["tie_word_embeddings"] is False
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{source}_hf")
        torch.testing.assert_close(logits(again), wanted)


def test_a_tied_pair_that_is_stored_twice_is_one_parameter(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_config("olmoe", tie_word_embeddings=True)).save_pretrained(
        tmp_path / "hf"
    )
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wanted = logits(model)
    torch.nn.init.zeros_(model.lm_head.weight)
    checkpoint.load(tmp_path / "hf", model)
    torch.testing.assert_close(logits(model), wanted, atol=0, rtol=0)
