"""Sources that the `datasets` library reads. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig, check_data
from fsdmoe.data.sources import open_sources
from fsdmoe.data.tokenizer import ByteTokenizer
from fsdmoe.testing import requires_transformers

datasets = pytest.importorskip("datasets")

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and a cache of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")


def section(tmp_path: Path, **keys: Any) -> DataConfig:
    return DataConfig(**{"cache_dir": str(tmp_path / "cache"), "holdout": 0.0, **keys})


def texts(config: DataConfig) -> list[str]:
    (store,), _ = open_sources(config)
    return [ByteTokenizer().decode(store.read(i, 0, 999).tolist()) for i in range(store.num_documents)]


@requires_transformers
def test_a_saved_dataset_of_chats_is_read_and_rows_it_leaves_out_are_left_out(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": letter}] for letter in "xyz"]
    dataset = datasets.Dataset.from_dict({"messages": chats}).select([2, 0])
    dataset.save_to_disk(tmp_path / "saved")
    found = texts(section(tmp_path, kind="chat", dataset=str(tmp_path / "saved")))
    assert [text.split("assistant\n")[1] for text in found] == ["z<|im_end|>\n", "x<|im_end|>\n"]


def test_text_comes_from_the_named_column_and_split(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"body": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    keys = {"kind": "text", "dataset": str(tmp_path / "saved"), "field": "body"}
    assert texts(section(tmp_path, **keys)) == ["train<|endoftext|>"]
    assert texts(section(tmp_path, **keys, split="test")) == ["test<|endoftext|>"]
    with pytest.raises(ConfigError, match=r"data\.split: expected one of train, test, .* got 'dev'"):
        check_data(section(tmp_path, **keys, split="dev"))
    with pytest.raises(
        ConfigError, match=r"data\.field: .*saved, row 0: no 'text' in the record, which has bo"
    ):
        open_sources(section(tmp_path, **{**keys, "field": ""}))


def test_a_folder_of_files_is_read_as_the_library_does(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.csv").write_text("text,n\none,1\ntwo,2\n")
    config = section(tmp_path, kind="text", dataset=str(tmp_path / "files"))
    assert texts(config) == ["one<|endoftext|>", "two<|endoftext|>"]


def test_columns_that_a_table_filled_with_null_do_not_reach_the_template(tmp_path: Path) -> None:
    from fsdmoe.data.readers import read_documents

    messages = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    datasets.Dataset.from_dict({"messages": [messages], "tools": [None]}).save_to_disk(tmp_path / "saved")
    config = section(tmp_path, kind="chat", dataset=str(tmp_path / "saved"))
    from fsdmoe.data.config import keyed_sources

    ((key, source),) = keyed_sources(config)
    (record,) = read_documents(key, source, [])
    assert record.content.messages == (  # type: ignore[union-attr]
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    )


def test_a_dataset_that_is_changed_is_read_again(tmp_path: Path) -> None:
    for letter in "ab":
        datasets.Dataset.from_dict({"text": [letter]}).save_to_disk(tmp_path / letter)
    folder = tmp_path / "saved"
    found = []
    for letter in "ab":
        (tmp_path / letter).rename(folder)
        found += texts(section(tmp_path, kind="text", dataset=str(folder)))
        folder.rename(tmp_path / f"{letter}_read")
    assert found == ["a<|endoftext|>", "b<|endoftext|>"]


def test_a_name_that_the_hub_does_not_answer_for_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config = section(tmp_path, kind="chat", dataset="nobody/nothing", tokenizer="bytes")
    with pytest.raises(ConfigError) as caught:
        open_sources(config)
    (line,) = caught.value.problems
    assert line.startswith("data.dataset: cannot load 'nobody/nothing' on this disk or by the Hub (")
    assert "without a network, save_to_disk elsewhere and name the folder" in line
