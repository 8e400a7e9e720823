"""Typical mistakes, each given to two ranks: the first line that is not the launcher's names the key
and the fix."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed.run

from fsdmoe.config import load_config
from fsdmoe.testing import NO_GPU
from tests.behaviour.test_mistakes import sabotaged
from tests.support.scripts import IMPORTS_ROOT, ROOT, Program
from tests.support.typical_mistakes import AT_FIRST_USE, TYPICAL, Typical

CONFIG = """
[model]
preset = "quickstart"
[precision]
param_dtype = "float32"
[data]
seq_len = 32
max_bytes = 20000
cache_dir = "{folder}/cache"
[train]
steps = 6
global_batch_size = 4
micro_batch_size = 1
output_dir = "{folder}/run"
"""
OF_A_LAUNCHER = re.compile(r"[WEI]\d{4} |\*+$|\s*$")
FULL_DISK = "a disk that is full at a save"
WHILE_RUNNING = (
    "a group that matches nothing",
    "a record with another field",
    "an array of records",
    "ids outside of the vocabulary",
    "prose for records",
    "ranks with other settings",
    "tokens of another width",
    FULL_DISK,
)
"""Found by ranks that have begun, behind what they say of their progress."""
SAMPLE = "lr alone"


@contextmanager
def ports() -> Iterator[dict[str, str]]:
    """One that is free, and one that is not."""
    with socket.socket() as busy, socket.socket() as free:
        busy.bind(("", 0))
        busy.listen()
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        yield {"port": str(port), "busy": str(busy.getsockname()[1])}


def start(folder: Path, mistake: Typical, found: dict[str, str]) -> list[Program]:
    """Two ranks, by torchrun or by hand."""
    script = folder / "script.py"
    words = shlex.split(mistake.arguments)
    given = [str(script if script.exists() else ROOT / "train.py")]
    given += [] if "--config" in words else ["--config", "run.toml"]
    command = ["tests/support/in_folder.py", str(folder)]
    environment = {**NO_GPU, **IMPORTS_ROOT}
    if not mistake.environment:
        launcher = [torch.distributed.run.__file__, "--standalone", "--nproc-per-node", "2"]
        return [Program(*command, *launcher, *given, *words, environment=environment)]
    environment |= {name: value.format(**found) for name, value in mistake.environment.items()}
    started = []
    for rank in range(2):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        started.append(
            Program(*command, *given, *words, *shlex.split(mistake.second * rank), environment=own)
        )
    return started


def write_files(folder: Path, mistake: Typical) -> None:
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    for file, content in mistake.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def first_line(text: str, *, is_running: bool) -> str:
    lines = [line for line in text.splitlines() if not OF_A_LAUNCHER.match(line)]
    if is_running:
        lines = [line for line in lines if "fsdmoe: " in line or "failed: " in line]
    return next((line for line in lines if not line.endswith("; loading torch")), "")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SAMPLE else pytest.mark.full) for name in TYPICAL]
)
def test_the_first_line_names_the_key_and_the_fix(name: str, tmp_path: Path) -> None:
    mistake = TYPICAL[name]
    write_files(tmp_path, mistake)
    if name == FULL_DISK:
        sabotaged("run.checkpoints.storage.inner.create = full", "all")(tmp_path)
    with ports() as found:
        started = start(tmp_path, mistake, found)
        try:
            assert started[0].wait(300) != 0
            line = first_line(started[0].stderr, is_running=name in WHILE_RUNNING)
        finally:
            for program in started:
                program.kill()
    assert mistake.key in line, started[0].stderr
    assert mistake.fix in line, started[0].stderr


@pytest.mark.parametrize("name", AT_FIRST_USE)
def test_the_first_line_of_one_process_names_the_key_and_the_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = AT_FIRST_USE[name]
    write_files(tmp_path, mistake)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(mistake.arguments)
    with pytest.raises(SystemExit):
        load_config([*words, *([] if "--config" in words else ["--config", "run.toml"])], world_size=2)
    line = first_line(capsys.readouterr().err, is_running=False)
    assert mistake.key in line
    assert mistake.fix in line
