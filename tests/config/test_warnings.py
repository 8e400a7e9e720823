"""Keys that are allowed and change nothing are named."""

from pathlib import Path

import pytest

from fsdmoe.config import load_config


def test_keys_for_a_gpu_are_named_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run")]
    load_config(run)
    assert capsys.readouterr().err == ""
    load_config([*run, "--fsdp.cpu_offload", "true", "--fsdp.register_buffers", "true"])
    warnings = capsys.readouterr().err.splitlines()
    assert [line.partition(": has")[0] for line in warnings] == [
        "fsdmoe: warning: fsdp.cpu_offload",
        "fsdmoe: warning: fsdp.register_buffers",
    ]


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
