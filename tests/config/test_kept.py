"""The configuration that a run keeps: it reads back to the same, and says what came from where."""

import re
import tomllib
from pathlib import Path

import pytest

from fsdmoe.config import build_config
from fsdmoe.config.kept import KEPT, kept_origins, kept_text, open_run, origins_of, write_kept
from fsdmoe.testing import requires_transformers

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


def world_of(path: Path) -> int:
    """The ranks that the file's first lines plan for."""
    found = re.search(r"--world (\d+)|--nproc-per-node (\d+)", path.read_text())
    return int(found[1] or found[2]) if found else 1


@requires_transformers
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_kept_configuration_reads_back_to_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    mapping = tomllib.loads(path.read_text())
    problems: list[str] = []
    config = build_config(mapping, {"train.seed": "5"}, world_of(path), problems, needs_data=False)
    assert config is not None, problems
    origins = origins_of(config, mapping, ["train.seed"], str(path))
    text = kept_text(config, origins, {"mesh.dp_shard": 8})
    again = build_config(tomllib.loads(text), {}, world_of(path), problems, needs_data=False)
    assert again == config, problems
    assert kept_origins(text) == origins


def test_each_value_has_its_origin() -> None:
    mapping = {"model": {"preset": "tiny-qwen3"}, "experts": {"balance": {"sequence": 0.5}}}
    config = build_config(mapping, {"data.lanes": "2", "experts.capacity.factor": "2"}, 1, [])
    assert config is not None
    origins = origins_of(config, mapping, ["data.lanes", "experts.capacity.factor"], "a.toml")
    assert origins["model.preset"] == origins["experts.balance.sequence"] == "a.toml"
    assert origins["model.num_experts"] == 'preset "tiny-qwen3"'
    assert origins["data.cursors"] == "command line", "by the name that the key has now"
    assert origins["experts.capacity.factor"] == "command line"
    assert "train.steps" not in origins, "a default"
    shown = kept_text(config, origins, {"experts.dispatcher": "local"})
    assert re.search(r'^#   experts.dispatcher +default; decided by "auto": local$', shown, re.M)


def test_a_file_may_be_called_anything() -> None:
    config = build_config({"train": {"steps": 3}}, {}, 1, [])
    assert config is not None
    text = kept_text(config, {"train.steps": 'odd\n[name]\x00"'}, {})
    assert build_config(tomllib.loads(text), {}, 1, []) == config


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    write_kept(tmp_path, "first = 1\n")
    with pytest.raises(UnicodeEncodeError):
        write_kept(tmp_path, "second = '\udcff'\n")
    assert (tmp_path / KEPT).read_text() == "first = 1\n"


def test_a_folder_inside_of_a_run_is_told_the_run(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/step_00000002").mkdir(parents=True)
    (tmp_path / "run/config.toml").touch()
    problems: list[str] = []
    assert open_run(str(tmp_path / "run/checkpoints/step_00000002"), problems) == ({}, {})
    assert problems[0].endswith(
        f"which is inside of the run {tmp_path / 'run'}; write --resume {tmp_path / 'run'}"
    )
