"""Weights that are not whole are found with the configuration, from the index and from headers."""

import json
from pathlib import Path

import pytest

from fsdmoe.config.weights import weight_problems

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 4000000000\n"
INDEX = "model.safetensors.index.json"


def shard(num_bytes: int, cut: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes - cut)


def index(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}}).encode()


CASES = {
    "whole": ({"a.safetensors": shard(9)}, ""),
    "whole shards": ({INDEX: index("a.safetensors"), "a.safetensors": shard(9)}, ""),
    "no weights at all": ({}, ""),
    "a pointer": (
        {"model.safetensors": POINTER.encode()},
        "model.hf: {folder}/model.safetensors is a pointer of git-lfs, not the weights; run `git",
    ),
    "a missing shard": (
        {INDEX: index("a.safetensors", "b.safetensors", "c.safetensors"), "a.safetensors": shard(9)},
        "model.hf: {folder}/b.safetensors and 1 more, which model.safetensors.index.json names, is",
    ),
    "a shard that was cut off": (
        {"a.safetensors": shard(9, cut=2)},
        "model.hf: {folder}/a.safetensors is cut off: it has ",
    ),
    "a page of a server": (
        {"a.safetensors": b"<html>" * 99}, "model.hf: {folder}/a.safetensors is cut off, or"),
    "an empty file": ({"a.safetensors": b""}, "model.hf: {folder}/a.safetensors is cut off, or no"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_files_that_are_not_whole_are_named_with_the_fix(name: str, tmp_path: Path) -> None:
    files, said = CASES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    problems = weight_problems(tmp_path)
    assert len(problems) == bool(said)
    assert not said or problems[0].startswith(said.format(folder=tmp_path))
    assert not said or "again" in problems[0]
