"""What a run needs of the disk is looked for with the configuration, before anything is built."""

import json
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from fsdmoe.config import load_config
from fsdmoe.core import events


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        load_config(["--train.output_dir", str(tmp_path / "file" / "run")])
    assert end.value.code == 2
    assert "train.output_dir: expected a folder to write to" in capsys.readouterr().err
    folders = ["--train.output_dir", str(tmp_path / "run"), "--checkpoint.folder", str(tmp_path / "file")]
    with pytest.raises(SystemExit) as end:
        load_config(folders)
    assert end.value.code == 2
    assert "checkpoint.folder: expected a folder to write to" in capsys.readouterr().err
    assert load_config([*folders, "--checkpoint.interval", "-1"]).config.checkpoint.interval == -1


def test_a_tokenizer_that_is_none_and_a_vocabulary_that_is_too_small_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    run = ["--train.output_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        load_config([*run, "--data.tokenizer", str(tmp_path)])
    assert end.value.code == 2
    assert "tokenizer.json is not a readable tokenizer.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        load_config([*run, "--model.vocab_size", "96"])
    assert end.value.code == 2
    assert "model.vocab_size: the tokenizer has 264 tokens, the model 96; raise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "address", "said"),
    [
        ("checkpoint.folder", "nowhere://bucket/run", "Protocol not known: nowhere"),
        ("checkpoint.load", "simplecache::nowhere://bucket/run", "Protocol not known: nowhere"),
        ("checkpoint.folder", "needy://bucket/run", "install needy_fs"),
    ],
)
def test_an_address_that_cannot_be_opened_here_is_refused_by_its_key(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    address: str,
    said: str,
) -> None:
    needy = {"class": "needy_fs.FileSystem", "err": "install needy_fs"}
    monkeypatch.setitem(known_implementations, "needy", needy)
    with pytest.raises(SystemExit) as end:
        load_config(["--train.output_dir", str(tmp_path / "run"), f"--{key}", address])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"fsdmoe: {key}: ")
    assert said in line


def test_an_address_that_goes_through_a_cache_is_taken(tmp_path: Path) -> None:
    folder = ["--checkpoint.folder", "simplecache::memory://bucket/run"]
    assert load_config(["--train.output_dir", str(tmp_path / "run"), *folder]).problems == ()


def begun(folder: Path, load: str, **keys: object) -> str:
    """A run that has a checkpoint of its own, and was started with this ``checkpoint.load``."""
    (folder / "checkpoints/step_00000009").mkdir(parents=True)
    (folder / "checkpoints/step_00000009/manifest.json").touch()
    table = "".join(f"{key} = {value}\n" for key, value in keys.items())
    (folder / "config.toml").write_text(f'[checkpoint]\nload = "{load}"\n{table}')
    return str(folder)


@pytest.mark.parametrize("program", [(), ("--evaluate-only",)])
@pytest.mark.parametrize("load", ["other", "nowhere"])
def test_a_run_that_has_begun_does_not_start_from_another_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load: str, program: tuple[str, ...]
) -> None:
    run = begun(tmp_path / "run", "latest")
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit) as end:
        load_config(["--run", run, "--checkpoint.load", str(tmp_path / load), *program])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f'checkpoint.load: expected "latest", since {run} has checkpoints of its own' in said
    assert f"--config {run}/config.toml --train.output_dir FOLDER --checkpoint.load {tmp_path / load}" in said


def test_a_dry_run_finds_that_too(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "latest")
    planned = load_config(["--run", run, "--checkpoint.load", "runs/nope", "--dry-run"])
    assert [line.partition(":")[0] for line in planned.problems] == ["checkpoint.load"]


def test_a_run_goes_on_by_the_command_that_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = str(tmp_path / "start")  # gone by now
    run = begun(tmp_path / "run", start, load_only_model="true")
    by_key = ["--train.output_dir", run, "--checkpoint.load", start]
    for command in (["--run", run], [*by_key, "--checkpoint.load_only_model", "true"]):
        assert load_config(command).config.checkpoint.load == start
    assert load_config(["--run", run, "--checkpoint.load", f"{run}/checkpoints/step_00000009"])
    with pytest.raises(SystemExit):
        load_config([*by_key, "--checkpoint.load_only_model", "false"])
    assert "checkpoint.load_only_model: expected true, as at the start" in capsys.readouterr().err


def restarted(folder: Path, first: str, last: str) -> str:
    """The same, but its last start was with another ``checkpoint.load`` than its first."""
    run = begun(folder, last)
    start = {"load": str(folder.parent / first), "load_only_model": False, "written": first}
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(f"# First start: {json.dumps(start)}\n{text}")
    return run


@pytest.mark.parametrize("last", ["latest", "run/checkpoints/step_00000009", "run"])
def test_the_first_command_goes_on_whatever_the_last_start_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.chdir(tmp_path)
    restarted(tmp_path / "run", "base", last)
    assert load_config(["--train.output_dir", "run", "--checkpoint.load", "base"])
    assert load_config(["--resume", "run"]).config.checkpoint.load == "latest"
    with pytest.raises(SystemExit):
        load_config(["--train.output_dir", "run", "--checkpoint.load", "other"])
    told = f"since run has checkpoints of its own and was started with '{tmp_path}/base', got 'other'"
    assert told in capsys.readouterr().err


def test_a_start_is_the_same_from_another_working_directory_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    run = restarted(tmp_path / "run", "base", "base")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for load in ("base", "link"):
        assert load_config(["--train.output_dir", run, "--checkpoint.load", str(tmp_path / load)])
    assert load_config(["--resume", run]).config.checkpoint.load == str(tmp_path / "base")


def test_the_folder_of_the_run_is_no_other_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "latest")
    for own in (run, f"{run}/checkpoints", f"{run}/checkpoints/", f"file://{run}/checkpoints"):
        assert load_config(["--resume", run, "--checkpoint.load", own])


def test_of_an_earlier_version_the_last_start_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", "latest")
    with pytest.raises(SystemExit):
        load_config(["--resume", run, "--checkpoint.load", "other"])
    assert "and was last started with 'latest', got 'other'" in capsys.readouterr().err


def test_an_evaluation_makes_no_folder_and_needs_none_that_can_be_written(tmp_path: Path) -> None:
    load_config(["--train.output_dir", str(tmp_path / "run"), "--evaluate-only"])
    (tmp_path / "file").touch()
    load_config(["--train.output_dir", str(tmp_path / "file" / "run"), "--evaluate-only"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_ranks_of_the_run_are_named_where_its_mesh_is_not_for_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("[mesh]\nep = 2\n")
    events.append(tmp_path, "start", step=0, ranks=2)
    with pytest.raises(SystemExit):
        load_config(["--resume", str(tmp_path)], world_size=1)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert "--resume: expected the 2 ranks of the run's last start, or a mesh for others, got 1" in first
    assert "start 2 ranks in all (on one host: --nproc-per-node 2), or change the mesh" in first
    assert "mesh.ep: " in second
    assert "torchrun" not in second
