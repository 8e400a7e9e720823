"""The command line: what it prints, what it converts, how it fails."""

import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer
from fsdmoe.checkpoint.__main__ import main
from fsdmoe.checkpoint.hf_config import config_json
from fsdmoe.models import Decoder
from fsdmoe.run.lock import RunLock
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_dense import dense
from tests.support.hf_pairs import hf_model, randomize, tiny


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    one = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path / "run")
    for step in (1, 2):
        one.save(step, {"model": {"w": torch.ones(100, 200)}, "step": step, "data": {"position": [1, 2]}})
    return tmp_path / "run"


def test_inspect_shows_the_folder_and_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", folder, "--tensors")
    assert code == 0
    for words in (
        "step_00000001",
        "step_00000002",
        "step 2",
        "20,000",
        "80.0 kB",
        "model/w",
        "[100, 200]",
        "float32",
    ):
        assert words in out, words
    code, out, _ = run(capsys, "inspect", folder / "step_00000001")
    assert "step 1" in out


def test_list_and_prune_show_and_delete_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", folder)
    assert code == 0
    assert out.index("step_00000002") < out.index("step_00000001")
    code, out, _ = run(capsys, "prune", folder, "--keep-last", 1)
    assert code == 0
    assert "deleted step_00000001" in " ".join(out.split())
    assert not (folder / "step_00000001").exists()
    assert "kept step_00000002" in out
    assert "may be running" not in out
    lock = RunLock(folder)
    lock.take()
    _, out, _ = run(capsys, "prune", folder, "--keep-last", 1)
    lock.release()
    assert f"the run of host {socket.gethostname()}, pid {os.getpid()}" in out
    assert "holds this folder and may be running" in out
    assert "deleted nothing; kept step_00000002" in out
    code, _, err = run(capsys, "prune", folder / "step_00000002", "--keep-last", 1)
    assert code == 1
    assert "expected a folder of checkpoints" in " ".join(err.split())


def test_a_damaged_newest_is_listed_as_such_and_prune_keeps_a_whole_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(folder / "step_00000002/data-00000-0.safetensors", 100)
    code, out, _ = run(capsys, "list", folder)
    assert code == 0
    assert "damaged" in out.split("step_00000002")[1]
    assert "80.5 kB" in out.split("step_00000001")[1]
    code, out, _ = run(capsys, "prune", folder, "--keep-last", 1)
    assert code == 0
    assert "deleted nothing; kept step_00000002, step_00000001" in out
    assert "damaged, so neither counted nor deleted: step_00000002" in out
    assert (folder / "step_00000001").exists()


def test_prune_finds_the_run_around_the_folder_that_it_is_called_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path / "run" / "checkpoints")
    one.save(1, {"model": {"w": torch.ones(2)}})
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    lock = RunLock(tmp_path / "run")
    lock.take()
    code, out, _ = run(capsys, "prune", ".", "--keep-last", 1)
    lock.release()
    assert code == 0
    assert "holds this folder and may be running" in out


def test_diff_names_the_tensors_that_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = folder / "step_00000001", folder / "step_00000002"
    code, out, _ = run(capsys, "diff", one, two)
    assert (code, "0 tensors differ, 1 are the same" in out) == (0, True)
    changed = torch.ones(100, 200)
    changed[3, 4] = 1.5
    checkpoint.save(folder / "other", w={"w": changed})
    checkpoint.save(folder / "third", w={"w": torch.ones(100, 200)}, v={"v": torch.ones(1)})
    code, out, _ = run(capsys, "diff", folder / "other", folder / "third")
    assert code == 1
    assert "at most 0.5" in out
    assert "only in third" in out


def test_diff_knows_values_that_are_no_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [float("nan"), float("inf"), 2.0]
    for name, last in (("one", 3.0), ("two", 3.0), ("three", 4.0), ("four", lost[0])):
        checkpoint.save(folder / name, w={"w": torch.tensor([*lost, last])})
    code, out, _ = run(capsys, "diff", folder / "one", folder / "two")
    assert (code, "0 tensors differ, 1 are the same" in out) == (0, True)
    code, out, _ = run(capsys, "diff", folder / "one", folder / "three")
    assert (code, "25.0% of elements, at most 1 (3.3e-01)" in out) == (1, True)
    code, out, _ = run(capsys, "diff", folder / "one", folder / "four")
    assert (code, "25.0% of elements, at most nan" in out) == (1, True)


def test_diff_counts_equal_values_of_other_bits_as_equal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sign in (("one", 1.0), ("two", -1.0)):
        values = torch.tensor([0.0, float("nan")])
        checkpoint.save(folder / name, w={"w": values.copysign(torch.tensor(sign))})
    code, out, _ = run(capsys, "diff", folder / "one", folder / "two")
    assert (code, "0 tensors differ, 1 are the same" in out) == (0, True)


def test_a_long_name_stands_on_one_line_in_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ".".join(["base_model.model.layers.0.moe.experts"] * 8)
    for number in (1, 2):
        checkpoint.save(folder / f"long{number}", w={name: torch.full((2,), float(number))})
    _, out, _ = run(capsys, "diff", folder / "long1", folder / "long2")
    assert [line for line in out.splitlines() if f"w/{name}" in line and "at most 1" in line]


def test_folders_and_names_are_printed_as_they_are_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ":smile:" / "run[base]" / ("x" * 200)
    names = [f"[bold]{number:030}" for number in range(40)]
    for name in names:
        checkpoint.save(folder / name, **{"w[red]": {"a": torch.ones(2)}})
    for command in (("list", folder), ("inspect", folder, "--tensors"), ("diff", folder, folder / names[0])):
        code, out, err = run(capsys, *command)
        assert (code, err) == (0, "")
        assert names[0] in out or command[0] == "diff"
        assert str(folder) in out or command[0] == "diff"
        assert "w[red]/a" in out or command[0] != "inspect"
    _, out, _ = run(capsys, "prune", folder, "--keep-last", 1)
    (line,) = out.splitlines()
    assert line.startswith(f"{folder}: deleted [bold]0")
    assert f"; kept {names[-1]}" in line


def test_diff_lists_weights_first_and_counters_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step in (("one", 1.0), ("two", 11.0)):
        states = {
            f"p{number}": {"step": torch.tensor(step), "exp_avg": step * torch.ones(4)}
            for number in range(30)
        }
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(model.weight, 0.1 * step)
        checkpoint.save(folder / name, model, states=states)
    _, out, _ = run(capsys, "diff", folder / "one", folder / "two", "--most", 3)
    rows = [line for line in out.splitlines() if "at most" in line and "elements" in line]
    assert [row.split()[1] for row in rows] == ["model/weight", "states/p0/exp_avg", "states/p1/exp_avg"]
    assert "61 tensors differ" in out
    assert "30 of them single numbers" in out
    assert "apart by at most 10" in out
    _, out, _ = run(capsys, "diff", folder / "one", folder / "two", "--only", "model/*")
    assert "1 tensors differ, 0 are the same" in out
    assert "states" not in out
    code, _, err = run(capsys, "diff", folder / "one", folder / "two", "--only", "weights/*")
    assert code == 1
    assert "--only: expected a pattern that matches the name of a tensor, got weights/*" in err


def test_verify_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify", folder)
    assert code == 0
    assert "every block is right" in out
    path = folder / "step_00000002/data-00000-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, err = run(capsys, "verify", folder / "step_00000002")
    assert code == 1
    assert "step_00000002/data-00000-0.safetensors: the checksum of block 0 does not match" in err


def test_wrong_calls_have_other_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "inspect", tmp_path / "nowhere")
    assert code == 1
    assert "no checkpoint here" in err
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    _, _, err = run(capsys, "verify", tmp_path / "run/checkpoint")
    assert f"it does not exist; did you mean {tmp_path}/run/checkpoints?" in err
    code, _, err = run(capsys, "veryfy", tmp_path)
    assert code == 2
    assert "fsdmoe checkpoint: veryfy: expected a command, got another word; did you mean verify?" in err
    with pytest.raises(SystemExit) as caught:
        main(["--frobnicate"])
    assert caught.value.code == 2
    assert "usage: fsdmoe checkpoint " in capsys.readouterr().err


@requires_transformers
def test_conversions_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_model(tiny("qwen3_moe")).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    code, out, _ = run(capsys, "from-hf", tmp_path / "hf", tmp_path / "ckpt")
    assert code == 0
    assert "num_experts = 8" in out
    code, _, _ = run(
        capsys,
        "to-hf",
        tmp_path / "ckpt",
        tmp_path / "out",
        "--config-from",
        tmp_path / "hf",
        "--dtype",
        "bfloat16",
    )
    assert code == 0
    assert (tmp_path / "out/tokenizer.json").exists()
    assert load_file(tmp_path / "out/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    code, _, err = run(capsys, "to-hf", tmp_path / "ckpt", tmp_path / "out")
    assert code == 1
    assert "--replace writes the new one in its place" in err
    assert run(capsys, "to-hf", tmp_path / "ckpt", tmp_path / "out", "--replace")[0] == 0
    (tmp_path / "out/notes.md").write_text("mine")
    code, _, err = run(capsys, "to-hf", tmp_path / "ckpt", tmp_path / "out", "--replace")
    assert code == 1
    assert "which --replace would delete (notes.md)" in err
    (tmp_path / "base").mkdir()  # a model that was not exported
    (tmp_path / "base/config.json").write_text("{}")
    code, _, err = run(capsys, "to-hf", tmp_path / "ckpt", tmp_path / "base", "--replace")
    assert code == 1
    assert "which are not replaced" in err
    assert (tmp_path / "base/config.json").read_text() == "{}"


@pytest.mark.parametrize("tokenizer", ["tokenizer", "tokenizer/tokenizer.json", "bytes"])
def test_a_runs_folder_is_exported_with_its_tokenizer_or_says_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    named = tokenizer if tokenizer == "bytes" else str(tmp_path / tokenizer)
    about = {"data": {"tokenizer": named}, "model": {"hf": None}}
    folder = tmp_path / "run" / checkpoint.RUN_FOLDER
    Checkpointer(CheckpointConfig(asynchronous=False), folder, about=about).save(
        1, {"model": Decoder(tiny("qwen3_moe"))}
    )
    code, out, _ = run(capsys, "to-hf", tmp_path / "run", tmp_path / "out")
    assert code == 0
    assert ("no tokenizer was written: the run's is bytes" in out) == (tokenizer == "bytes")
    assert (tmp_path / "out/tokenizer.json").exists() == (tokenizer != "bytes")


def test_stock_folders_out_and_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Decoder(tiny("qwen3_moe"))
    randomize(model, 0.3)
    checkpoint.save(tmp_path / "ckpt", model, step=4)
    rename = r"model\.(.*)=backbone.\1"
    code, out, _ = run(capsys, "to-dcp", tmp_path / "ckpt", tmp_path / "stock", "--map", rename)
    assert code == 0
    assert "dcp.load" in out
    code, _, err = run(capsys, "from-dcp", tmp_path / "stock", tmp_path / "again")
    assert code == 1
    assert "backbone.embed_tokens.weight" in err
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config_json(dataclasses.asdict(model.config))))
    back = (r"backbone\.(.*)=model.\1", "--config-from", tmp_path / "hf", "--step", 9)
    code, out, _ = run(capsys, "from-dcp", tmp_path / "stock", tmp_path / "again", "--map", *back)
    assert code == 0
    for words in ("--checkpoint.load_only_model true", "num_experts = 8"):
        assert words in out
    other = Decoder(tiny("qwen3_moe"))
    assert checkpoint.load(tmp_path / "again", other, step=0) == {"step": 9}
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    code, _, err = run(capsys, "from-dcp", tmp_path / "stock", tmp_path / "again", "--map", "x")
    assert code == 1
    assert "--map: expected 'regex=replacement'" in err


@requires_transformers
def test_upcycle_refuses_what_is_not_exact_and_prints_the_model_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense("qwen3", tmp_path / "dense")
    arguments = ("upcycle", tmp_path / "dense", tmp_path / "ckpt", "--groups", 2, "--granularity", 2)
    code, _, err = run(capsys, *arguments, "--top-k", 3)
    assert code == 1
    assert "--inexact" in err
    code, out, _ = run(capsys, *arguments, "--top-k", 2)
    assert code == 0
    assert "num_experts = 4" in out
    assert "moe_intermediate_size = 24" in out


def convert(folder: str) -> int:
    return main(["to-hf", f"{folder}/ckpt", f"{folder}/out", "--shard-size", "0.00005"])


def test_ranks_convert_together(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", Decoder(tiny("qwen3_moe")))
    assert run_ranks(convert, 2, str(tmp_path)) == [0, 0]
    listed = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(listed.values())) > 2
    for name, file in listed.items():
        assert name in load_file(tmp_path / "out" / file)
