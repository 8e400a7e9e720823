"""``train.py --evaluate-only`` gives the loss of the evaluation inside of a run, and changes nothing."""

import json
from pathlib import Path

import pytest

from fsdmoe.config import to_toml
from fsdmoe.testing import requires_transformers
from tests.support.hf_tiny import tiny_hf
from tests.support.scripts import run_program, started_ranks
from tests.support.tiny_run import tiny_config


def evaluated(*arguments: str) -> float:
    done = run_program("train.py", *arguments, "--evaluate-only")
    assert done.wait() == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("held-out loss")]
    return float(line.split()[2].rstrip(","))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_gives_the_loss_of_the_run_under_another_layout_and_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    keys = {
        "train__steps": 4,
        "train__eval_interval": 4,
        "checkpoint__interval": 0,
        "checkpoint__load": "latest",
        "health__hang_seconds": 600,  # which writes stacks
    }
    config.write_text(to_toml(tiny_config(str(tmp_path / "run"), 2, **keys)))
    with started_ranks(2, "train.py", "--config", str(config), "--mesh.ep", "2") as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (inside,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    (tmp_path / "run/run.lock").write_text("of a run that goes on")
    before = contents(tmp_path / "run")
    assert evaluated("--config", str(config)) == pytest.approx(inside, rel=1e-5)
    other = evaluated("--config", str(config), "--data.holdout", "1")  # on all documents
    assert other != pytest.approx(inside, rel=1e-5)
    assert contents(tmp_path / "run") == before


@requires_transformers
def test_so_it_does_on_a_hugging_face_folder(tmp_path: Path) -> None:
    model = tiny_hf("qwen3_moe", vocab_size=264)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    given = [
        "--model.hf", str(tmp_path / "hf"), "--data.tokenizer", "bytes", "--data.kind", "python-stdlib",
        "--data.max_bytes", "200000", "--data.seq_len", "32", "--train.output_dir", str(tmp_path / "run"),
        "--train.global_batch_size", "4", "--train.micro_batch_size", "4",
        "--precision.param_dtype", "float32",
    ]  # fmt: skip
    loss = evaluated(*given)
    trained = run_program(
        "train.py", *given, "--train.steps", "1", "--train.eval_interval", "1", "--optim.lr", "1e-30"
    )
    assert trained.wait() == 0, trained.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (inside,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert loss == pytest.approx(inside, rel=1e-5)


def test_it_refuses_a_model_that_nobody_trained(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(to_toml(tiny_config(str(tmp_path / "run"), 1, checkpoint__load="latest")))
    done = run_program("train.py", "--config", str(config), "--evaluate-only")
    assert done.wait() == 2
    assert "checkpoint.load: expected a checkpoint, got none in" in done.stderr
