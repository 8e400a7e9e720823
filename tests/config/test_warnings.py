"""Keys that are allowed and change nothing are named."""

import tomllib
from pathlib import Path

import pytest
import torch

from fsdmoe.config import load_config, warnings
from fsdmoe.config.build import compose
from fsdmoe.config.command_line import split_arguments


def test_keys_for_a_gpu_are_named_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run"), "--precision.param_dtype", "float32"]
    load_config(run).warn_of_device(has_gpu=False)
    assert capsys.readouterr().err == ""
    load_config([*run, "--fsdp.cpu_offload", "true", "--fsdp.register_buffers", "true"]).warn_of_device(
        has_gpu=False
    )
    warnings = capsys.readouterr().err.splitlines()
    assert [line.partition(": saves")[0] for line in warnings] == [
        "fsdmoe: warning: fsdp.cpu_offload",
        "fsdmoe: warning: fsdp.register_buffers",
    ]


def test_a_recipe_that_another_one_computes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run"), "--precision.emulate", "true"]
    run += ["--precision.param_dtype", "float32"]
    load_config([*run, "--precision.recipe", "fp8_fast"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fsdmoe: warning: precision.recipe: fp8_fast is computed by fp8_blockwise: ")
    load_config([*run, "--precision.recipe", "fp8_blockwise"])
    assert capsys.readouterr().err == ""


def test_rows_that_the_model_is_not_meant_for_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run"), "--data.seq_len", "128"]
    load_config([*run, "--model.max_position_embeddings", "64"])
    warning = (
        "data.seq_len: rows of 128 tokens are longer than model.max_position_embeddings = 64; raise that"
    )
    assert warning in capsys.readouterr().err
    load_config([*run, "--model.max_position_embeddings", "128"])
    assert "data.seq_len" not in capsys.readouterr().err


def test_bfloat16_is_named_on_a_cpu_that_has_no_instructions_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run")]
    monkeypatch.setattr(warnings, "multiplies_bf16", lambda: False)
    load_config(run).warn_of_device(has_gpu=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fsdmoe: warning: precision.param_dtype: products in bfloat16 take some 100 times")
    assert line.endswith('set precision.param_dtype = "float32"')
    load_config([*run, "--precision.param_dtype", "float32"]).warn_of_device(has_gpu=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(warnings, "multiplies_bf16", lambda: True)
    load_config(run).warn_of_device(has_gpu=False)
    assert capsys.readouterr().err == ""


def test_a_cpu_multiplies_bfloat16_where_onednn_says_so_or_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for answer in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda a=answer: a, raising=False)
        assert warnings.multiplies_bf16() is answer
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert warnings.multiplies_bf16()


@pytest.mark.parametrize(
    ("key", "value", "reader"),
    [
        ("optim.decay_fraction", "0.5", ("optim.schedule", "wsd")),
        ("memory.layers", "0-1", ("memory.recompute", "norms")),
        ("experts.expert_choice.factor", "2", ("experts.selection", "expert_choice")),
        ("health.max_rollbacks", "5", ("health.on_spike", "rollback")),
        ("precision.loss_scale.initial", "8", ("precision.param_dtype", "float16")),
    ],
)
def test_keys_that_another_one_switches_off_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, reader: tuple[str, str]
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run"), "--experts.balance.sequence", "0"]
    load_config([*run, f"--{key}", value])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fsdmoe: warning: {key}: has no effect without {reader[0]}")
    load_config([*run, f"--{key}", value, f"--{reader[0]}", reader[1]])
    assert "has no effect" not in capsys.readouterr().err


def unread(*arguments: str, **program: bool) -> list[str]:
    """What is said of keys without effect, as ``KEY: what it needs``."""
    _, overrides = split_arguments(arguments, problems := [])
    config, _ = compose({"data": {"kind": "python-stdlib"}}, overrides, problems)
    assert not problems
    lines = [line for line in warnings.warnings_of(config, **program) if "effect" in line]
    return [line.partition("; ")[0].replace("has no effect without ", "") for line in lines]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            "--adapter.rank 4 --adapter.kind none --adapter.alpha 99 --adapter.dropout 0.5",
            [f'adapter.{key}: adapter.kind = "lora" or "dora"' for key in ("rank", "alpha", "dropout")],
        ),
        ("--adapter.kind dora", ["adapter.kind: adapter.rank above 0"]),
        ("--adapter.kind none", []),
        ("--adapter.kind none --adapter.alpha 9", ["adapter.alpha: adapter.rank above 0"]),
        ("--experts.clones 2", ["experts.clones: mesh.ep above 1"]),
        ("--experts.clones 2 --mesh.ep 2", []),
        (
            "--checkpoint.keep_every 10 --checkpoint.interval -1",
            ["checkpoint.keep_every: checkpoint.interval 0 or more"],
        ),
        ("--checkpoint.keep_every 10 --checkpoint.interval 0", []),
        (
            "--train.eval_batches 2 --train.eval_interval -1",
            ["train.eval_batches: train.eval_interval 0 or more"],
        ),
        ("--train.eval_batches 2 --train.eval_interval 0", []),
        ("--precision.loss_scale.minimum 2 --precision.reduce_dtype float16", []),
    ],
)
def test_what_a_key_needs_is_named(arguments: str, lines: list[str]) -> None:
    assert unread(*arguments.split()) == lines


def test_an_evaluation_alone_reads_its_batches_whatever_the_interval() -> None:
    assert unread("--train.eval_batches", "2", "--train.eval_interval", "-1", evaluate_only=True) == []


def test_packaged_configurations_set_no_key_that_is_not_read() -> None:
    files = sorted((Path(__file__).parents[2] / "fsdmoe/configs").rglob("*.toml"))
    assert files
    for file in files:
        config, _ = compose(tomllib.loads(file.read_text()), {}, [], needs_data=False)
        assert not warnings._unread_warnings(config), file
