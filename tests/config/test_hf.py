"""What a Hugging Face folder decides of the data, and what a run on it must be told."""

import json
from pathlib import Path

import pytest

from fsdmoe.config import load_config
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer, and a corpus beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    tiny_hf("qwen3_moe", vocab_size=264).config.save_pretrained(tmp_path / "hf")  # type: ignore[union-attr, operator]
    words = {"<|endoftext|>": 0, "one": 1, "two": 2, "?": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "corpus.txt").write_text("one two " * 100)
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    given = ["--model.hf", str(folder / "hf"), "--train.output_dir", str(folder / "run"), *more]
    return [*given, "--data.cache_dir", str(folder / "cache")]


def text(folder: Path) -> list[str]:
    return ["--data.kind", "text", "--data.path", str(folder / "corpus.txt")]


def test_the_folders_tokenizer_is_the_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(arguments(folder, *text(folder))).config
    assert config.data.tokenizer == str(folder / "hf")
    assert "data.tokenizer" not in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_pointer_of_git_lfs_is_refused_before_anything_is_built(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 4000000000\n"
    (folder / "hf/model.safetensors").write_text(pointer)
    said = f"model.hf: {folder}/hf/model.safetensors is a pointer of git-lfs, not the weights; run `git lfs"
    if more:
        assert [
            line for line in load_config(arguments(folder, *text(folder), *more)).problems if said in line
        ]
        return
    with pytest.raises(SystemExit):
        load_config(arguments(folder, *text(folder)))
    assert said in capsys.readouterr().err
    (folder / "hf/tokenizer.json").write_text(pointer)
    with pytest.raises(SystemExit):
        load_config(arguments(folder, *text(folder)))
    assert "tokenizer.json is a pointer of git-lfs, not the tokenizer; run" in capsys.readouterr().err


def test_another_tokenizer_warns_and_a_copy_of_it_does_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = folder / "tokenizer.json"
    copied.write_bytes((folder / "hf/tokenizer.json").read_bytes())
    load_config(arguments(folder, *text(folder), "--data.tokenizer", str(copied)))
    assert "data.tokenizer" not in capsys.readouterr().err
    other = json.loads(copied.read_text())
    other["model"]["vocab"] |= {"one": 2, "two": 1}
    copied.write_text(json.dumps(other))
    load_config(arguments(folder, *text(folder), "--data.tokenizer", str(copied)))
    expected = f"warning: data.tokenizer: {str(copied)!r} is not the tokenizer of model.hf"
    assert expected in capsys.readouterr().err


def test_data_must_be_named_for_a_run_and_not_for_a_plan_without_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(arguments(folder))
    assert end.value.code == 2
    assert "data.path: expected data to train the model of model.hf on" in capsys.readouterr().err
    assert load_config(arguments(folder, "--dry-run", "--files-elsewhere")).dry_run
    (folder / "hf/tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        load_config(arguments(folder, *text(folder)))
    assert "data.tokenizer: expected the tokenizer of the model, got none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_named", "line"),
    [
        (
            "pytorch_model.bin",
            False,
            "; convert it once to safetensors with transformers: AutoModelForCausalLM.",
        ),
        ("model.safetensors", True, "model.safetensors'; name its folder, {folder}/hf"),
    ],
)
def test_weights_that_are_pickles_or_named_themselves_are_told_what_to_do(
    name: str, is_named: bool, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hf" / name).write_bytes(b"weights")
    model = folder / "hf" / name if is_named else folder / "hf"
    with pytest.raises(SystemExit):
        load_config(
            ["--model.hf", str(model), "--data.kind", "python-stdlib", "--train.output_dir", str(folder)]
        )
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("fsdmoe: model.hf: expected")
    assert line.format(folder=folder) in first


def test_a_preset_next_to_a_folder_is_told_where_to_take_it_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.toml").write_text('[model]\npreset = "qwen3-30b-a3b"\n')
    with pytest.raises(SystemExit):
        load_config(["--config", str(folder / "own.toml"), *arguments(folder, *text(folder))])
    assert (
        "model.preset: expected none, since the folder of model.hf decides the model, got 'qwen3-30b-a3b'; "
        "take preset out of [model] in the file of --config"
    ) in capsys.readouterr().err
