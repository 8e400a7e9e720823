"""Mistakes that users make, under torchrun: a line before all of its own, and its root-cause block, show one
message with cause and fix, and the ranks end with the code that ``docs/training.md`` names."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.run

from fsdmoe.config import to_toml
from fsdmoe.testing import NO_GPU
from tests.support.scripts import IMPORTS_ROOT, ROOT, Program
from tests.support.tiny_run import tiny_config

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Mistake:
    """Arguments on top of a tiny run's, what is done to its folder before, and the answer."""

    words: tuple[str, ...]
    """All of them stand in the root-cause block."""
    arguments: tuple[str, ...] = ()
    code: int = 2
    prepare: Callable[[Path], None] = lambda folder: None
    is_said_once: bool = True
    """As our own line, in the block, and nowhere else. Not so an error that nobody expected, with its
    traceback, and one that ranks meet each in its own words."""


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def train_before(*arguments: str) -> Callable[[Path], None]:
    """A run in the same folder that ended well."""

    def prepare(folder: Path) -> None:
        done = launch(1, folder, "--train.steps", "2", "--checkpoint.interval", "0", *arguments)
        assert done.returncode == 0, done.stdout

    return prepare


def damage(folder: Path) -> None:
    train_before()(folder)
    (path,) = (folder / "run/checkpoints").glob("step_*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-7])


def write_hf(folder: Path) -> None:
    """A model's folder, and a configuration that says nothing of model and data."""
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    ).save_pretrained(folder / "hf")  # fmt: skip
    (folder / "run.toml").write_text('[data]\ntokenizer = "bytes"\nseq_len = 32\n')


# Raised in the middle of a run: on every rank, or on the last one only.
SABOTAGE = """
import os, sys
from fsdmoe import train
from fsdmoe.launch.ranks import run_rank
last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
step = train.Run.train_step
def full(name, file):
    raise OSError(28, "No space left on device")
def broken(run):
    if run.progress["step"] == 2 and (last or "{who}" == "all"):
        {what}
    return step(run)
train.Run.train_step = broken
sys.exit(run_rank(sys.argv[1:]))
"""


def sabotaged(what: str, who: str = "last") -> Callable[[Path], None]:
    return write("script.py", SABOTAGE.format(what=what, who=who))


MISTAKES = {
    "ep that does not divide": Mistake(
        ("mesh.ep: expected a divisor of the 8 experts, got 3",), ("--mesh.ep", "3")
    ),
    "an unknown key": Mistake(("train.step: unknown key; did you mean train.steps?",), ("--train.step", "5")),
    "an unknown section": Mistake(("--trian.steps: unknown option",), ("--trian.steps", "5")),
    "a word for a number": Mistake(("train.steps: expected", "'many'"), ("--train.steps", "many")),
    "no such configuration": Mistake(("--config", "nowhere.toml"), ("--config", "nowhere.toml")),
    "a broken configuration": Mistake(
        ("broken.toml",), ("--config", "broken.toml"), prepare=write("broken.toml", "[train\nsteps = 1")
    ),
    "no such data": Mistake(("data.path", "nowhere"), ("--data.kind", "text", "--data.path", "nowhere")),
    "data without a path": Mistake(("data.path: expected a file",), ("--data.kind", "jsonl")),
    "a record without its field": Mistake(
        ("data.field: ", "a.jsonl:1", "no 'text' in the record", "data.on_error"),
        ("--data.kind", "jsonl", "--data.path", "a.jsonl", "--data.max_bytes", "none"),
        prepare=write("a.jsonl", '{"txt": "one"}\n'),
    ),
    "a file that is no text": Mistake(
        ("data.path: a.txt is not UTF-8 text",),
        ("--data.kind", "text", "--data.path", "a.txt"),
        prepare=write("a.txt", b"\xff\xfe\xfd"),
    ),
    "empty data": Mistake(
        ("data.path: the 1 file(s) of a.txt are empty; give some text",),
        ("--data.kind", "text", "--data.path", "a.txt"),
        prepare=write("a.txt", ""),
    ),
    "no such tokenizer": Mistake(("data.tokenizer: expected", "nowhere"), ("--data.tokenizer", "nowhere")),
    "no such model": Mistake(("model.hf: expected a folder",), ("--model.hf", "nowhere")),
    "a model without data": Mistake(
        ("data.path: expected data to train the model of model.hf on",),
        ("--model.hf", "hf"),
        prepare=write_hf,
    ),
    "a vocabulary that is too small": Mistake(
        ("model.vocab_size: the tokenizer has 264 tokens",), ("--model.vocab_size", "96")
    ),
    "a batch that does not divide": Mistake(
        ("train.global_batch_size: 3 sequences cannot be divided",), ("--train.global_batch_size", "3")
    ),
    "a folder that cannot be written": Mistake(
        ("train.output_dir: expected a folder to write to",), ("--train.output_dir", "/proc/run")
    ),
    "no such checkpoint": Mistake(
        ('checkpoint.load: expected "latest", "none" or a folder, got',), ("--checkpoint.load", "nowhere")
    ),
    "another model's checkpoint": Mistake(
        ("model.hidden_size 32 -> 64", "set it back, or give this run another train.output_dir"),
        ("--model.hidden_size", "64", "--checkpoint.load", "latest"),
        prepare=train_before(),
    ),
    "a damaged checkpoint": Mistake(
        ("checkpoint.load", "nothing was changed"), ("--checkpoint.load", "latest"), code=1, prepare=damage,
        is_said_once=False,
    ),
    "nothing to evaluate on": Mistake(
        ("data.holdout: expected a fraction above 0",), ("--data.holdout", "0")
    ),
    "fp8 on a CPU": Mistake(
        ("precision.param_dtype: expected one of",), ("--precision.param_dtype", "float8")
    ),
    "an exception in a step": Mistake(
        ("ZeroDivisionError in step 3: division by zero", "see its traceback"),
        code=1,
        prepare=sabotaged("1 / 0"),
        is_said_once=False,
    ),
    "the same exception on all ranks": Mistake(
        ("ZeroDivisionError in step 3: division by zero",), code=1, prepare=sabotaged("1 / 0", "all"),
        is_said_once=False,
    ),
    "out of memory": Mistake(
        ("OutOfMemoryError in step 3", "lower train.micro_batch_size", "docs/faq.md"),
        code=1,
        prepare=sabotaged("raise __import__('torch').OutOfMemoryError('CUDA out of memory')"),
        is_said_once=False,
    ),
    "a rank that is killed": Mistake(
        ("ended without a message of its own", "SIGKILL", "host memory"),
        code=-9,
        prepare=sabotaged("os.kill(os.getpid(), 9)"),
    ),
    "a crash in a library": Mistake(
        ("ended without a message of its own", "a crash inside of a library"),
        code=-6,
        prepare=sabotaged("os.abort()"),
    ),
    "a full disk": Mistake(
        ("train.output_dir: no space left in", "free some"),
        ("--checkpoint.interval", "2"),
        code=1,
        prepare=sabotaged("run.checkpoints.storage.inner.create = full", "all"),
        is_said_once=False,  # the summary's line too says how the run ended
    ),
}  # fmt: skip


def launch(world_size: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    command = [str(script) if script.exists() else str(ROOT / "train.py"), "--config", "run.toml", *arguments]
    if "--config" in arguments:
        del command[1:3]
    return subprocess.run(
        [*LAUNCHER, "--nproc-per-node", str(world_size), *command],
        cwd=folder, env=os.environ | NO_GPU | IMPORTS_ROOT, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def root_cause(output: str) -> str:
    """The launcher's last block."""
    assert output.count("Root Cause (first observed failure):") == 1, output
    return output.partition("Root Cause (first observed failure):")[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny_config(str(tmp_path / "run"), 4, train__steps=6, data__cache_dir=str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(to_toml(config))
    return tmp_path


CASES = [(size, name) for size in (2, 4) for name in MISTAKES]


@pytest.mark.full  # in the quick suite: test_typical_mistakes.py
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_a_mistake_is_the_root_cause_in_one_clear_message(folder: Path, world_size: int, name: str) -> None:
    mistake = MISTAKES[name]
    mistake.prepare(folder)
    done = launch(world_size, folder, *mistake.arguments)
    block = root_cause(done.stdout)
    assert f"exitcode  : {mistake.code} " in block, done.stdout
    assert all(word in block for word in mistake.words), done.stdout
    if name == "a rank that is killed":  # the other closed its files before the launcher ended it
        assert "lost contact with another rank in step 3" in (folder / "run/errors.txt").read_text()
        assert "status" in (folder / "run/summary.txt").read_text()
    if not mistake.is_said_once:
        return
    of_ours = done.stdout.count(mistake.words[0]) - block.count(mistake.words[0])
    assert of_ours == (mistake.code > 0), "once before the launcher's page, where the rank could still speak"
    assert done.stdout.count("Traceback (most recent call last)") == 1, "the launcher's own"


def launcher_of(kind: str, folder: Path) -> Program:
    """Two ranks of a run that would go on for long."""
    script = [str(ROOT / "train.py"), "--config", str(folder / "run.toml"), "--train.steps", "100000"]
    script += ["--checkpoint.interval", "0"]
    if kind == "torchrun":
        return Program(torch.distributed.run.__file__, "--standalone", "--nproc-per-node", "2", *script)
    return Program("tests/support/forking_launcher.py", "2", *script)


@contextlib.contextmanager
def running(folder: Path, kind: str) -> Iterator[tuple[Program, list[int]]]:
    """The launcher and its ranks, once they have made a few steps."""
    launcher, ranks = launcher_of(kind, folder), list[int]()
    try:
        deadline, metrics = time.monotonic() + 300, folder / "run/metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert launcher.process.is_alive(), launcher.stdout + launcher.stderr
            assert time.monotonic() < deadline, "the run did not start stepping"
            time.sleep(0.1)
        pid = launcher.process.pid
        ranks += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        yield launcher, ranks
    finally:
        launcher.kill()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["forking", pytest.param("torchrun", marks=pytest.mark.full)])
def test_ranks_end_with_a_checkpoint_when_their_launcher_is_killed(folder: Path, kind: str) -> None:
    with running(folder, kind) as (launcher, ranks):
        assert len(ranks) == 2
        launcher.kill()
        deadline = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline, "a rank goes on without its launcher"
            time.sleep(0.1)
    gone = f"the launcher (pid {launcher.process.pid}) is gone"
    assert gone in (folder / "run/errors.txt").read_text()
    assert gone in launcher.stderr
    steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    saved = (folder / "run/checkpoints/latest").read_text().strip()
    assert int(saved.removeprefix("step_")) >= max(steps)
    assert "stopped by the end of its launcher" in (folder / "run/summary.txt").read_text()
