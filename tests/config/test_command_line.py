"""The command line: flags and overrides, help, and how a refused configuration ends."""

import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fsdmoe.config import load_config
from fsdmoe.config.values import parse_override
from fsdmoe.memory.config import MemoryConfig
from tests.support.scripts import IMPORTS_ROOT, run_program

ROOT = Path(__file__).parents[2]
HF = ROOT / "configs/qwen3-30b-a3b"
WITHOUT_TORCH = """
import os, runpy, sys
class Loading:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.stdout.flush()
            print("TORCH", file=sys.stderr, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Loading())
runpy.run_path("train.py", run_name="__main__")
"""
"""``train.py`` until it loads torch."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.output_dir", "--mesh.ep", "1"], "train.output_dir: expected a value after it"),
        (["--train.steps"], "train.steps: expected a value after it"),
        (["--config"], "--config: expected a value after it"),
        (["--world", "8"], "--world: only plans"),
        (["--run", str(ROOT / "tests")], "which has no config.toml"),
        (["--resume", "no/run"], "expected the folder of a run, got 'no/run', which is not there"),
        (
            ["--resume", str(HF)],
            f"--resume: expected the folder of a run, got '{HF}', a model of Hugging Face; ",
        ),
        (["--resume", __file__], "a file; name the folder of its run"),
        (["--run", "no/run"], "--run: expected the folder of a run, got 'no/run', which is not there"),
        (["--run", f"{ROOT}/testss"], f"which is not there; did you mean {ROOT}/tests?"),
        (["--run", "x", "--config", "y.toml"], "--run: expected no --config with it"),
        (["--resume", "no/run"], "--resume: expected the folder of a run, got 'no/run', which is not there"),
        (["--resume", "x", "--config", "y.toml"], "--resume: expected no --config with it"),
        (["--resume"], "--resume: expected a value after it"),
        (["--run", "x", "--train.output_dir", "y"], "write --config x/config.toml --train.output_dir FOLDER"),
        (["-np", "2", "--config", "x.toml"], "-np: expected --nproc-per-node for the number of ranks"),
        (["--files-elsewhere"], "--files-elsewhere: only plans"),
        (["--gpu", "48"], "--gpu: only plans"),
        (["--world", "²", "--dry-run"], "--world: expected a positive number of ranks, got '²'"),
        (["--world=", "--dry-run"], "--world: expected a positive number of ranks, got ''"),
    ],
)
def test_an_incomplete_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["none", "[]"])
def test_a_list_is_emptied_by_none_as_by_brackets(text: str) -> None:
    values: dict[str, object] = {"recompute": ["norms"]}
    problems: list[str] = []
    parse_override(values, MemoryConfig, "memory.recompute", text, problems)
    assert (values, problems) == ({"recompute": []}, [])


@pytest.mark.parametrize("size", ["0", "two"])
def test_a_world_that_is_no_number_of_ranks_is_refused(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit) as end:
        load_config([])
    assert end.value.code == 2
    assert f"WORLD_SIZE: expected a positive number of ranks, got '{size}'; unset" in capsys.readouterr().err


def test_a_bare_switch_is_true_and_fractions_may_lack_a_zero(tmp_path: Path) -> None:
    config = load_config(["--fsdp.lean", "--optim.lr", ".5", "--train.output_dir", str(tmp_path)]).config
    assert (config.fsdp.lean, config.optim.lr) == (True, 0.5)


def test_the_command_exits_with_2_and_plain_lines_on_rank_0_and_one_on_others() -> None:
    first = run_program("train.py", "--mesh.epp", "4", "--config", "no/such.toml", RANK="0", WORLD_SIZE="2")
    assert first.wait() == 2
    assert "Traceback" not in first.stderr
    assert "mesh.epp: unknown key; did you mean mesh.ep?" in first.stderr
    assert "--config: no file at 'no/such.toml'" in first.stderr
    other = run_program("train.py", "--mesh.epp", "4", "--optim.lrr", "1", RANK="1", WORLD_SIZE="2")
    line = "fsdmoe: rank 1: mesh.epp: unknown key; did you mean mesh.ep?\n"
    assert (other.wait(), other.stderr, other.stdout) == (2, line, "")


@pytest.mark.parametrize("flag", ["--config", "--resume"])
def test_nothing_is_said_of_the_defaults_where_a_file_is_missing(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        flag,
        "nothere",
        "--mesh.ep",
        "3",
        "--experts.flex.rows",
        "3",
        "--optim.lrr",
        "1",
        "--optimm.lr",
        "1",
    ]
    with pytest.raises(SystemExit):
        load_config(words, 2)
    missing, *others = capsys.readouterr().err.splitlines()
    assert missing.startswith(f"fsdmoe: {flag}: ")
    assert "'nothere'" in missing
    assert others == [
        "fsdmoe: optim.lrr: unknown key; did you mean optim.lr?",
        "fsdmoe: --optimm.lr: unknown option; did you mean optim.lr?",
    ]


def test_nothing_is_said_of_the_mesh_where_an_option_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(ROOT / "configs/quickstart.toml"), "--nprocs", "2", "--mesh.ep", "2"]
    with pytest.raises(SystemExit):
        load_config(arguments, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fsdmoe: --nprocs: unknown option; write --nproc-per-node N")


def test_a_missing_corpus_is_refused_before_anything_is_built() -> None:
    result = run_program("train.py", "--data.kind", "text", "--data.path", "no/such/corpus")
    assert result.wait() == 2
    assert "data.path" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "key",
    [
        "model.hf",
        "data.path",
        "data.tokenizer",
        "train.output_dir",
        "checkpoint.folder",
        "checkpoint.load",
        "resume",
    ],
)
def test_a_path_that_cannot_be_looked_at_is_named_by_its_key(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name that is too long, which fails for root too, as a folder of others does for all but root."""
    monkeypatch.chdir(tmp_path)
    path = "x" * 300 + "/y"
    kind = ["--data.kind", "text"] if key == "data.path" else []
    with pytest.raises(SystemExit) as end:
        load_config([f"--{key}", path, *kind])
    assert end.value.code == 2
    line = capsys.readouterr().err
    name = "--resume" if key == "resume" else key
    assert line.startswith(f"fsdmoe: {name}: expected a path that this user may read, got 'xxx"), line
    assert line.endswith("(File name too long); change its permissions, or name another\n"), line


def test_a_path_in_a_file_that_cannot_be_looked_at_is_named_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'[[data.sources]]\nkind = "text"\npath = "{"x" * 300}"\n')
    with pytest.raises(SystemExit):
        load_config(["--config", str(path)])
    assert capsys.readouterr().err.startswith("fsdmoe: data.sources.path: expected a path that this user may")


def test_print_config_prints_what_the_run_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(["--config", str(ROOT / "configs/quickstart.toml"), "--train.steps=11", "--print-config"])
    assert end.value.code == 0
    assert tomllib.loads(capsys.readouterr().out)["train"]["steps"] == 11


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "runs/quickstart"),
        (["--model.preset", "mixtral-8x7b"], "runs/mixtral-8x7b"),
        (["--config", "{folder}/my.run.toml"], "runs/my.run"),
        (["--config", "{folder}/own.toml"], "elsewhere"),
        (["--config", "{folder}/own.toml", "--train.output_dir", "runs/x"], "runs/x"),
    ],
)
def test_the_folder_of_a_run_has_the_name_of_its_configuration(
    arguments: list[str], folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.run.toml").write_text("[train]\nsteps = 3\n")
    (tmp_path / "own.toml").write_text('[train]\noutput_dir = "elsewhere"\n')
    with pytest.raises(SystemExit):
        load_config([*(word.format(folder=tmp_path) for word in arguments), "--print-config"])
    assert tomllib.loads(capsys.readouterr().out)["train"]["output_dir"] == folder


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_a_reader_who_has_seen_enough_is_no_error(flag: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, redirect_stdout(stream), pytest.raises(SystemExit) as stop:
        load_config([flag])
    assert stop.value.code == 0


def until_torch(*arguments: str) -> tuple[str, str]:
    """What ``train.py`` prints before torch is loaded, on both streams."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=ROOT, env=os.environ | IMPORTS_ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr


def test_the_configuration_is_checked_and_the_first_line_printed_before_torch_is_loaded(
    tmp_path: Path,
) -> None:
    given = ["--config", "configs/quickstart.toml", "--train.output_dir", str(tmp_path)]
    first = "fsdmoe: a run on 1 rank, by configs/quickstart.toml; loading torch\nTORCH\n"
    assert until_torch(*given) == ("", first)
    assert until_torch(*given, "--mesh.ep", "3")[1].startswith("fsdmoe: mesh.ep: ")


@pytest.mark.parametrize("words", ["--help", "--help lr", "--print-config"])
def test_help_and_the_printed_configuration_load_no_torch(words: str) -> None:
    out, err = until_torch(*words.split())
    assert "lr" in out
    assert err == ""
