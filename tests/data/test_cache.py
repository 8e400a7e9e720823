"""Tokenised once, by one process, whole or not at all."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig
from fsdmoe.data import cache as cache_module
from fsdmoe.data import sources as sources_module
from fsdmoe.data.cache import cache_folder, open_or_build
from fsdmoe.data.sources import open_sources
from fsdmoe.data.store import write_meta


def text_config(tmp_path: Path) -> DataConfig:
    return DataConfig(
        kind="text", path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), separator="|"
    )


@pytest.fixture
def builds(monkeypatch) -> list[Path]:
    """The folders that were tokenised."""
    seen: list[Path] = []
    original = sources_module._tokenise

    def counting(folder, *rest):
        seen.append(folder)
        original(folder, *rest)

    monkeypatch.setattr(sources_module, "_tokenise", counting)
    return seen


def test_a_source_is_tokenised_once_and_again_when_its_file_changes(tmp_path, builds):
    (tmp_path / "a.txt").write_text("one|two")
    first = open_sources(text_config(tmp_path))[0][0]
    assert open_sources(text_config(tmp_path))[0][0].fingerprint == first.fingerprint
    assert len(builds) == 1
    (tmp_path / "a.txt").write_text("one|two|three")
    assert open_sources(text_config(tmp_path))[0][0].num_documents == 3
    assert len(builds) == 2


def test_a_damaged_cache_is_built_again(tmp_path, builds):
    (tmp_path / "a.txt").write_text("one|two")
    open_sources(text_config(tmp_path))
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert open_sources(text_config(tmp_path))[0][0].read(1, 0, 99).tolist() == [*b"two", 256]
    assert len(builds) == 2


def test_a_failed_or_killed_build_leaves_nothing_behind_that_looks_whole(tmp_path, builds):
    (tmp_path / "a.txt").write_bytes(b"one|\xff")
    for _ in range(2):
        with pytest.raises(ConfigError, match="UTF-8"):
            open_sources(text_config(tmp_path))
    assert len(builds) == 2, "a new start tries again"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    (tmp_path / "a.txt").write_bytes(b"one|two")
    partial = tmp_path / "cache" / f"{builds[0].stem}.building"
    partial.mkdir()
    (partial / "tokens.bin").write_text("half")
    assert open_sources(text_config(tmp_path))[0][0].num_documents == 2


RANK = """
import os, sys, time
from pathlib import Path
from fsdmoe.data import cache, store
root, mark, fails = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "fail"
sleep = time.sleep
def check_in():
    mark.with_suffix(f".{os.getpid()}").touch()
def sleep_and_tell(seconds):
    check_in()
    sleep(seconds)
cache.time.sleep = sleep_and_tell  # only who found the lock taken sleeps
def build(folder):
    with mark.open("a") as file:
        file.write("built\\n")
    check_in()
    while len(list(mark.parent.glob("mark.*"))) < 3:
        sleep(0.01)
    if fails:
        raise cache.ConfigError("data.path: a.txt:7: broken; fix it")
    writer = store.StoreWriter(folder, dtype="uint16", with_targets=False)
    import numpy as np
    writer.add(np.arange(5))
    writer.close()
try:
    print(store.open_store(cache.open_or_build(root, "key", build), name="x").num_tokens)
except cache.ConfigError as error:
    print("refused:", error)
"""


def start_three_ranks(tmp_path: Path, outcome: str) -> list[str]:
    """Three processes that ask for the same folder while one builds it, without torch for speed."""
    bare = (
        "import sys, types\n"
        "package = types.ModuleType('fsdmoe.data')\n"
        f"package.__path__ = {[str(p) for p in sys.modules['fsdmoe.data'].__path__]!r}\n"
        "sys.modules['fsdmoe.data'] = package\n"
    )
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, "-c", bare + RANK, str(tmp_path), str(marks / "mark"), outcome]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert (marks / "mark").read_text() == "built\n", "only one of them builds"
    return outputs


def test_ranks_that_start_together_build_once_and_all_read_it(tmp_path):
    assert start_three_ranks(tmp_path, "work") == ["5", "5", "5"]


def test_ranks_that_waited_for_a_failing_build_fail_alike_without_repeating_it(tmp_path):
    assert start_three_ranks(tmp_path, "fail") == ["refused: data.path: a.txt:7: broken; fix it"] * 3


def test_a_waiting_process_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fsdmoe.data.cache._SAY_WAITING_AFTER", -1.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl,sys; f=open(sys.argv[1],'a'); fcntl.flock(f,2); "
         "print('held',flush=True); sys.stdin.read()", str(tmp_path / "key.lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    polls: list[float] = []

    def let_go_at_the_third(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            holder.communicate()

    monkeypatch.setattr("fsdmoe.data.cache.time.sleep", let_go_at_the_third)
    open_or_build(tmp_path, "key", lambda folder: write_meta(folder, {"fingerprint": "x"}))
    assert len(polls) == 3
    assert capsys.readouterr().err.count("waiting for another process") == 1


def test_progress_is_one_plain_line_with_the_counts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one|two")
    open_sources(text_config(tmp_path))
    assert f"data: tokenised {tmp_path / 'a.txt'}: 2 documents, 8 tokens in" in capsys.readouterr().err


def test_long_work_reports_on_the_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cache_module, "SAY_EVERY_SECONDS", -1.0)
    (tmp_path / "a.txt").write_text("one|two")
    open_sources(text_config(tmp_path))
    assert "file 1 of 1, 2 documents" in capsys.readouterr().err


def test_the_default_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "fsdmoe" / "data"


def test_nothing_in_a_store_is_pickled(tmp_path):
    (tmp_path / "a.txt").write_text("one|two")
    open_sources(text_config(tmp_path))
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    names = {path.name for path in folder.iterdir()}
    assert names == {"tokens.bin", "offsets.bin", "hashes.bin", "meta.json"}
    assert json.loads((folder / "meta.json").read_text())["files"]["tokens.bin"] == 16


def test_a_full_disk_names_the_cache_even_if_no_message_can_be_left(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(
        ConfigError, match=r"^data\.cache_dir: no space left in .*; free some space in .*another$"
    ):
        open_or_build(tmp_path, "key", full)
    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(ConfigError, match=r"^data\.cache_dir: no space left in "):
        open_or_build(tmp_path, "other", full)
