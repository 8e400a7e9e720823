"""A wrong section is refused at once, with the key and the fix."""

from __future__ import annotations

import tomllib

import pytest

from fsdmoe.config.values import build_section, parse_override
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig, SourceConfig

TEXT = SourceConfig(path="a.txt")

BAD = {
    "row too short": ({"seq_len": 1}, r"data\.seq_len: expected at least 2"),
    "holdout of more than everything": ({"holdout": 1.1}, r"data\.holdout: expected a fraction"),
    "negative holdout": ({"holdout": -0.1}, r"data\.holdout: expected a fraction"),
    "negative workers": ({"num_workers": -1}, r"data\.num_workers: expected 0 or more, got -1"),
    "negative prefetch": ({"prefetch": -1}, r"data\.prefetch: expected 0 or more, got -1"),
    "no vocabulary": ({"vocab_size": 0}, r"data\.vocab_size"),
    "no cursors": ({"cursors": 0}, r"data\.cursors: expected at least 1"),
    "pieces below a row": ({"piece_len": 10}, r"data\.piece_len: expected at least data\.seq_len = 1024"),
    "pieces without shuffling": ({"piece_len": 4096, "shuffle": False}, r"data\.piece_len: only shuffled"),
    "no tokenizer": ({"tokenizer": ""}, r"data\.tokenizer: expected"),
    "ends for bytes": ({"eos_token": "</s>"}, r"data\.eos_token"),
    "no path": ({"kind": "text"}, r"data\.path: expected a file, directory or glob for kind 'text'"),
    "unknown kind": ({"kind": "csv", "path": "a"}, r"data\.kind: expected one of python-stdlib"),
    "path for stdlib": (
        {"path": "a.txt"},
        r"data\.path: python-stdlib .* takes no path, .*data\.kind = \"text\"",
    ),
    "records for stdlib": ({"path": "x/a.jsonl.gz"}, r"remove it or set data\.kind = \"jsonl\""),
    "no bytes": ({"max_bytes": 0}, r"data\.max_bytes: expected a positive size"),
    "wrong dtype": ({"kind": "tokens", "path": "a", "dtype": "int8"}, r"data\.dtype: expected one of uint16"),
    "option of another kind": (
        {"kind": "jsonl", "path": "a", "separator": "|"},
        r"data\.separator: kind 'jsonl'",
    ),
    "a path and a dataset": (
        {"kind": "chat", "path": "a", "dataset": "b"},
        r"data\.dataset: expected a path or a dataset, got 'a' and 'b'",
    ),
    "a dataset of files": ({"kind": "jsonl", "dataset": "b"}, r"data\.dataset: kind 'jsonl' does not use it"),
    "a split of a path": (
        {"kind": "chat", "path": "a", "split": "b"},
        r"data\.split: belongs to data\.dataset",
    ),
    "a path, its glob and a dataset": (
        {"kind": "chat", "path": "a", "dataset": "b", "glob": "c"},
        r"data\.dataset: expected a path or a dataset, got 'a' and 'b'; remove one$",
    ),
    "a glob of a dataset": (
        {"kind": "chat", "dataset": "a", "glob": "b"},
        r"data\.glob: belongs to data\.path",
    ),
    "zero weight": (
        {"sources": (SourceConfig(path="a", weight=0.0),)},
        r"data\.sources\[0\]\.weight: expected a pos",
    ),
    "negative weight": (
        {"sources": (TEXT, SourceConfig(path="b", weight=-1.0))},
        r"data\.sources\[1\]\.weight: expected a positive number, got -1.0",
    ),
    "endless weight": (
        {"sources": (SourceConfig(path="a", weight=float("inf")),)},
        r"data\.sources\[0\]\.weight",
    ),
    "both ways": (
        {"sources": (TEXT,), "kind": "text", "path": "a"},
        r"data\.sources: .* data\.kind, data\.path",
    ),
    "same name twice": ({"sources": (TEXT, TEXT)}, r"data\.sources: the name 'a\.txt' occurs twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_section_is_refused_with_key_and_fix(case):
    keys, message = BAD[case]
    with pytest.raises(ConfigError, match=message) as caught:
        DataConfig(**keys)
    assert all(line.startswith("data.") and ";" in line for line in caught.value.problems)


def test_everything_wrong_is_reported_together():
    with pytest.raises(ConfigError) as caught:
        DataConfig(seq_len=0, holdout=2.0, sources=(SourceConfig(weight=0.0),))
    keys = [line.split(":")[0] for line in caught.value.problems]
    assert keys == ["data.seq_len", "data.holdout", "data.sources[0].path", "data.sources[0].weight"]


def test_a_text_of_a_dataset_may_be_in_any_column():
    assert DataConfig(kind="text", dataset="a", field="body").field == "body"


def test_the_default_section_needs_no_files():
    assert DataConfig().kind == "python-stdlib"


def test_a_mixture_is_written_as_an_array_of_tables():
    text = """
    [data]
    seq_len = 512
    [[data.sources]]
    kind = "jsonl"
    path = "web/*.jsonl"
    weight = 3
    [[data.sources]]
    kind = "tokens"
    path = "code/"
    document_end = 0
    """
    problems: list[str] = []
    config = build_section(DataConfig, tomllib.loads(text)["data"], "data", problems)
    assert problems == []
    assert config == DataConfig(
        seq_len=512,
        sources=(
            SourceConfig(kind="jsonl", path="web/*.jsonl", weight=3.0),
            SourceConfig(kind="tokens", path="code/", document_end=0),
        ),
    )


def test_a_key_is_read_under_the_name_that_it_had_before():
    problems: list[str] = []
    assert build_section(DataConfig, {"lanes": 3}, "data", problems) == DataConfig(cursors=3)
    values = {"lanes": 3}
    parse_override(values, DataConfig, "data.cursors", "5", problems)
    assert build_section(DataConfig, values, "data", problems) == DataConfig(cursors=5)
    parse_override(values, DataConfig, "data.lanes", "7", problems)
    assert build_section(DataConfig, values, "data", problems) == DataConfig(cursors=7)
    assert problems == []


def test_both_names_of_a_key_are_refused():
    problems: list[str] = []
    build_section(DataConfig, {"lanes": 3, "cursors": 4}, "data", problems)
    assert problems == ["data.lanes: is data.cursors now, which is set too; remove lanes"]
