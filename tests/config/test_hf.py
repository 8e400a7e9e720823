"""What a Hugging Face folder decides of the data, and what a run on it must be told."""

import json
import tomllib
from pathlib import Path

import pytest

from fsdmoe.config import load_config, to_toml
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import tiny_hf
from tests.support.moe_families import tiny_config

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


def with_file(folder: Path, model: str) -> list[str]:
    (folder / "own.toml").write_text(f"[model]\n{model}\n")
    return ["--config", str(folder / "own.toml"), *arguments(folder, *text(folder))[2:]]


PRESETS = ("quickstart", "qwen3-30b-a3b")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_folder_on_the_command_line_takes_the_place_of_a_files_preset(folder: Path, preset: str) -> None:
    command = with_file(folder, f'preset = "{preset}"')
    found = load_config([*command, "--model.hf", str(folder / "hf")])
    assert found.config.model.hf == str(folder / "hf")
    assert found.config == load_config(arguments(folder, *text(folder))).config
    assert "model.preset" not in found.origins


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("model", "options", "fix"),
    [
        ('preset = "{preset}"\nhf = "{hf}"', "", "take preset out of [model] in the file of --config"),
        ('hf = "{hf}"', "--model.preset {preset}", "drop --model.preset, or add --model.hf none"),
        ("", "--model.preset {preset} --model.hf {hf}", "drop --model.preset, or drop --model.hf"),
    ],
)
def test_any_other_preset_next_to_a_folder_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, options: str, fix: str, preset: str
) -> None:
    names = {"preset": preset, "hf": folder / "hf"}
    with pytest.raises(SystemExit):
        load_config([*with_file(folder, model.format(**names)), *options.format(**names).split()])
    assert capsys.readouterr().err == (
        "fsdmoe: model.preset: expected none, since the folder of model.hf decides the model, got "
        f"{preset!r}; {fix}\n"
    )


def test_a_printed_configuration_of_a_folder_reads_back(folder: Path) -> None:
    """Those of earlier versions hold the default preset."""
    config = load_config(arguments(folder, *text(folder))).config
    printed = to_toml(config)
    assert "preset" not in tomllib.loads(printed)["model"]
    for written in (printed, printed.replace("[model]", '[model]\npreset = "quickstart"')):
        (folder / "printed.toml").write_text(written)
        assert load_config(["--config", str(folder / "printed.toml")]).config == config


def test_what_an_earlier_version_printed_of_a_family_with_names_of_its_own_reads_back(folder: Path) -> None:
    """It read neither ERNIE's dense layers nor its shared experts; a hand-written key is still wrong."""
    config = tiny_config("ernie4_5_moe", vocab_size=264)
    config.save_pretrained(folder / "hf")
    found = load_config(arguments(folder, *text(folder))).config
    assert (found.model.num_moe_layers, found.model.n_shared_experts) == (1, 1)
    printed = to_toml(found).replace("first_k_dense_replace = 1", "first_k_dense_replace = 0")
    (folder / "printed.toml").write_text(printed.replace("n_shared_experts = 1", "n_shared_experts = 0"))
    assert load_config(["--config", str(folder / "printed.toml")]).config == found
    with pytest.raises(SystemExit):
        load_config(arguments(folder, *text(folder), "--model.first_k_dense_replace", "0"))
