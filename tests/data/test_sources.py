"""Every kind of source, from files on disk to batches."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig, DataStream, SourceConfig, build_data, check_data
from fsdmoe.data.files import find_files
from fsdmoe.data.sources import open_sources
from fsdmoe.data.tokenizer import ByteTokenizer

EOS = ByteTokenizer.eos_id


@pytest.fixture
def section(tmp_path: Path) -> Any:
    """A `DataConfig` with a cache of its own."""

    def make(**keys: Any) -> DataConfig:
        return DataConfig(**{"cache_dir": str(tmp_path / "cache"), "holdout": 0.0, "seq_len": 8, **keys})

    return make


def documents(config: DataConfig, source: int = 0) -> list[str]:
    """What a store holds, as text, without the end-of-text tokens (which must be there)."""
    store = open_sources(config)[0][source]
    texts = []
    for i in range(store.num_documents):
        tokens = store.read(i, 0, 1 << 60)
        assert tokens[-1] == EOS
        texts.append(ByteTokenizer().decode(tokens[:-1].tolist()))
    return texts


def open_stream(config: DataConfig, **keys: Any) -> DataStream:
    shape = {"dp_rank": 0, "dp_size": 1, "micro_batch_size": 1, "global_batch_size": 2, "seed": 0, **keys}
    return build_data(config, **shape)


def test_a_text_file_is_a_document(tmp_path, section):
    (tmp_path / "a.txt").write_text("héllo\r\n")
    assert documents(section(kind="text", path=str(tmp_path / "a.txt"))) == ["héllo\r\n"]


def test_a_directory_is_read_recursively_in_sorted_order_through_its_glob(tmp_path, section):
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for name, text in {
        "b.txt": "two",
        "a.txt": "one",
        "deep/c.txt": "three",
        "skip.md": "no",
        "z.txt": "",
    }.items():
        (tmp_path / "corpus" / name).write_text(text)
    config = section(kind="text", path=str(tmp_path / "corpus"))
    assert documents(config) == ["one", "two", "three"]
    assert documents(section(kind="text", path=str(tmp_path / "corpus"), glob="*.md")) == ["no"]
    assert documents(section(kind="text", path=str(tmp_path / "corpus" / "[ab].txt"))) == ["one", "two"]


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_files_are_read_in_the_order_of_their_names_as_text(tmp_path, pattern):
    for name in ("a/x.txt", "a-b/x.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = find_files("data", SourceConfig(path=str(tmp_path / pattern)))
    names = [file.path.relative_to(tmp_path).as_posix() for file in found]
    assert names == ["a-b/x.txt", "a.txt", "a/x.txt"]


def test_a_separator_cuts_a_file_into_documents_wherever_blocks_of_reading_end(
    tmp_path, section, monkeypatch
):
    monkeypatch.setattr("fsdmoe.data.readers._BLOCK_BYTES", 3)
    (tmp_path / "a.txt").write_text("one<sep>two<sep><sep>three three")
    assert documents(section(kind="text", path=str(tmp_path), glob="a.txt", separator="<sep>")) == [
        "one",
        "two",
        "three three",
    ]


def test_a_size_cap_ends_with_the_document_that_reaches_it(tmp_path, section):
    (tmp_path / "a.txt").write_text("aaaa|bbbb|cccc|dddd")
    assert documents(section(kind="text", path=str(tmp_path), separator="|", max_bytes=5)) == ["aaaa", "bbbb"]


def test_jsonl_records_are_read_plain_and_compressed_under_any_key(tmp_path, section):
    lines = [json.dumps({"body": text}) for text in ("first", "", "second")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "third"}'))
    assert documents(section(kind="jsonl", path=str(tmp_path), field="body")) == ["first", "second", "third"]


def test_parquet_columns_are_read(tmp_path, section):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["one", "two"], "other": [1, 2]}), tmp_path / "a.parquet")
    assert documents(section(kind="parquet", path=str(tmp_path))) == ["one", "two"]


def test_the_standard_library_is_a_corpus_of_real_python_with_a_size_cap(section):
    config = section(kind="python-stdlib", max_bytes=300_000)
    texts = documents(config)
    assert 300_000 <= sum(len(text.encode()) for text in texts) < 1_500_000
    assert sum("def " in text for text in texts) > len(texts) // 3
    assert documents(config) == texts


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_pretokenised_files_are_mapped_with_their_offsets(tmp_path, section, suffix):
    tokens, offsets = np.arange(10, dtype=np.uint16), np.array([0, 4, 4, 10])
    if suffix == "npy":
        np.save(tmp_path / "a.npy", tokens)
    else:
        tokens.astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.offsets.npy", offsets)
    (store,), vocab_size = open_sources(section(kind="tokens", path=str(tmp_path), vocab_size=10))
    assert vocab_size == 10
    assert [store.read(i, 0, 99).tolist() for i in range(store.num_documents)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
    ]


def test_pretokenised_files_without_offsets_end_documents_at_the_given_id(tmp_path, section, monkeypatch):
    monkeypatch.setattr("fsdmoe.data.pretokenised._SCAN_TOKENS", 3)
    np.array([5, 0, 6, 7, 0, 8], dtype="<u4").tofile(tmp_path / "a.bin")
    np.array([1, 2, 0], dtype="<u4").tofile(tmp_path / "b.bin")
    config = section(kind="tokens", path=str(tmp_path), dtype="uint32", document_end=0)
    (store,), _ = open_sources(config)
    found = [store.read(i, 0, 99).tolist() for i in range(store.num_documents)]
    assert found == [[5, 0], [6, 7, 0], [8], [1, 2, 0]], "documents never cross from one file into the next"


def test_a_pretokenised_file_without_boundaries_is_one_document(tmp_path, section):
    np.save(tmp_path / "a.npy", np.arange(10))
    (store,), _ = open_sources(section(kind="tokens", path=str(tmp_path / "a.npy")))
    assert store.lengths(np.arange(1)).tolist() == [10]


def test_a_mixture_reads_all_its_sources_by_weight(tmp_path, section):
    (tmp_path / "a.txt").write_text("|".join(["a" * 9] * 40))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "b" * 9}) for _ in range(40)))
    sources = (
        SourceConfig(kind="text", path=str(tmp_path / "a.txt"), separator="|", weight=3.0),
        SourceConfig(kind="jsonl", path=str(tmp_path / "b.jsonl"), weight=1.0, name="bees"),
    )
    stream = open_stream(section(sources=sources, prefetch=0), global_batch_size=20)
    text = "".join(ByteTokenizer().decode(batch.tokens_BS.flatten().tolist()) for batch in stream.next_step())
    assert text.count("a") / text.count("b") == pytest.approx(3, rel=0.2)
    assert {span.source for span in stream.consumed_documents()} == {str(tmp_path / "a.txt"), "bees"}


def test_the_content_and_not_the_place_names_a_data_set(tmp_path, section):
    for name in ("x", "y", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same" if name != "z" else "other")
    prints = [open_sources(section(kind="text", path=str(tmp_path / n)))[0][0].fingerprint for n in "xyz"]
    assert prints[0] == prints[1] != prints[2]


def test_targets_and_boundaries_are_part_of_the_fingerprint(tmp_path, section):
    (tmp_path / "a.txt").write_text("one|two")
    prints = {
        open_sources(section(kind="text", path=str(tmp_path), separator=separator))[0][0].fingerprint
        for separator in ("|", "t", "")
    }
    assert len(prints) == 3


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


BAD_FILES = {
    "missing path": (
        {"kind": "text", "path": "nowhere"},
        {},
        r"data\.path: .*'nowhere', which does not exist",
    ),
    "empty glob": ({"kind": "text", "path": ".", "glob": "*.x"}, {"a.txt": "a"}, r"data\.glob: .*\*\.x"),
    "no match": ({"kind": "text", "path": "*.x"}, {"a.txt": "a"}, r"data\.path: no file matches"),
    "empty corpus": ({"kind": "text", "path": "a.txt"}, {"a.txt": ""}, r"data\.path: .* empty"),
    "only separators": (
        {"kind": "text", "path": "a.txt", "separator": "|"},
        {"a.txt": "|||"},
        r"data\.path: .* no documents",
    ),
    "not UTF-8": (
        {"kind": "text", "path": "a.txt"},
        {"a.txt": b"\xff\xfe"},
        r"data\.path: .*a\.txt is not UTF-8",
    ),
    "not gzip": (
        {"kind": "text", "path": "a.txt.gz"},
        {"a.txt.gz": b"no"},
        r"data\.path: cannot read .*a\.txt\.gz",
    ),
    "not JSON": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '{"text": "a"}\n{'},
        r"a\.jsonl:2: not JSON",
    ),
    "not an object": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": "3"},
        r"a\.jsonl:1: expected a JSON object, got int; fix or remove the line",
    ),
    "an array of objects": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '[{"text": "a"}]'},
        r"data\.path: .*a\.jsonl:1: expected a JSON object, got list; write one .*a\.jsonl > a\.lines\.jsonl",
    ),
    "an array in a packed file": (
        {"kind": "jsonl", "path": "a.jsonl.gz"},
        {"a.jsonl.gz": gzip.compress(b'[{"text": "a"}]')},
        r"gzip -dc .*a\.jsonl\.gz \| jq -c '\.\[\]' > a\.lines\.jsonl",
    ),
    "an array among objects": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '{"text": "a"}\n["b"]'},
        r"data\.path: .*a\.jsonl:2: expected a JSON object, got list; fix or remove the line",
    ),
    "an array of objects over lines": (
        {"kind": "jsonl", "path": "a.json"},
        {"a.json": '[\n{"text": "a"}\n]'},
        r"data\.path: .*a\.json:1: not JSON .*; write one object a line, .*a\.jsonl",
    ),
    "no such key": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '{"body": "a"}'},
        r"data\.field: .*:1: .*body",
    ),
    "not a text": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '{"text": 3}'},
        r"data\.field: .*:1: .* got int",
    ),
    "half a character": (
        {"kind": "jsonl", "path": "a.jsonl"},
        {"a.jsonl": '{"text": "\\ud800"}'},
        r"a\.jsonl:1: not valid Unicode",
    ),
    "not Parquet": (
        {"kind": "parquet", "path": "a.parquet"},
        {"a.parquet": "no"},
        r"data\.path: .* as Parquet",
    ),
    "not npy": (
        {"kind": "tokens", "path": "a.npy"},
        {"a.npy": "no"},
        r"data\.path: .*a\.npy is not a readable",
    ),
    "a pointer of git-lfs": (
        {"kind": "text", "path": "a.txt"},
        {"a.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"},
        r"data\.path: .*a\.txt is a pointer of git-lfs, not the data; run `git lfs pull` in ",
    ),
    "ids of 16 bits read as 32": (
        {"kind": "tokens", "path": "a.bin", "dtype": "uint32"},
        {"a.bin": b"\x05\x00\x07\x00" * 100},
        r'data\.dtype: .* but read as uint16 all are; set data\.dtype = "uint16"',
    ),
    "ids of 32 bits read as 16": (
        {"kind": "tokens", "path": "a.bin"},
        {"a.bin": b"\x05\x00\x00\x00" * 200},
        r'data\.dtype: every second id of .*a\.bin is 0 as uint16, .* set data\.dtype = "uint32"',
    ),
    "odd size": ({"kind": "tokens", "path": "a.bin"}, {"a.bin": b"abc"}, r"data\.dtype: .*a\.bin"),
    "wrong suffix": (
        {"kind": "tokens", "path": "a.txt"},
        {"a.txt": "ab"},
        r"data\.path: expected \.npy or \.bin",
    ),
    "cache in a file": ({"cache_dir": "a.txt"}, {"a.txt": "a"}, r"data\.cache_dir: .* got 'a\.txt'"),
    "no tokenizer": ({"tokenizer": "nowhere.json"}, {}, r"data\.tokenizer: .*nowhere\.json"),
    "bad tokenizer": (
        {"tokenizer": "a.json"},
        {"a.json": "{}"},
        r"data\.tokenizer: a\.json is not a readable",
    ),
    "tokenizer without tokens": (
        {"tokenizer": "a.json"},
        {"a.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'},
        r"data\.tokenizer: a\.json has no tokens",
    ),
    "small vocabulary": (
        {"vocab_size": 100},
        {},
        r"data\.vocab_size: expected at least the tokenizer's 264, got 100",
    ),
    "unknown marker": (
        {"kind": "chat", "path": "a.jsonl", "chat_template": "own.jinja"},
        {"a.jsonl": "{}", "own.jinja": "<|turn|>{{ messages[0].content }}"},
        r"data\.chat_template: own\.jinja writes <\|turn\|>, which the tokenizer has no tokens for",
    ),
    "message without role": (
        {"kind": "chat", "path": "a.jsonl"},
        {"a.jsonl": '{"messages": [{"content": "a"}]}'},
        r"a\.jsonl:1: message 0 needs a `role`",
    ),
    "role with a marker": (
        {"kind": "chat", "path": "a.jsonl"},
        {"a.jsonl": '{"messages": [{"role": "<|im_end|>", "content": "a"}]}'},
        r"a\.jsonl:1: message 0 needs a `role`",
    ),
    "no messages": (
        {"kind": "chat", "path": "a.jsonl"},
        {"a.jsonl": '{"messages": []}'},
        r":1: expected a list",
    ),
    "nothing to learn": (
        {"kind": "chat", "path": "a.jsonl"},
        {"a.jsonl": '{"messages": [{"role": "human", "content": "a"}]}'},
        r"data\.chat_loss_roles: no turn of a\.jsonl",
    ),
    "everything held out": (
        {"kind": "text", "path": "a.txt", "holdout": 0.01},
        {"a.txt": "one document"},
        r"data\.holdout: all 1 document\(s\) of a\.txt",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_named_with_its_key_and_place(case, tmp_path, section, monkeypatch):
    keys, files, message = BAD_FILES[case]
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        _write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message) as caught:
        open_stream(section(**keys))
    assert ";" in str(caught.value), "the fix follows"


@pytest.mark.parametrize(
    "case",
    [
        "cache in a file",
        "no tokenizer",
        "bad tokenizer",
        "tokenizer without tokens",
        "small vocabulary",
        "unknown marker",
    ],
)
def test_a_tokenizer_or_a_cache_that_will_not_do_is_found_without_opening_the_data(
    case, tmp_path, section, monkeypatch
):
    keys, files, message = BAD_FILES[case]
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        _write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message):
        check_data(section(**keys))


def test_a_missing_tokenizer_library_is_found_by_the_same_check(tmp_path, section, monkeypatch):
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "fsdmoe.data.hf_tokenizer", raising=False)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* pip install 'fsdmoe\[data\]'"):
        check_data(section(tokenizer=str(tmp_path / "a.json")))


def test_bad_offsets_are_refused(tmp_path, section):
    np.save(tmp_path / "a.npy", np.arange(10))
    for offsets in ([0, 5], [1, 10], [0, 7, 3, 10], [[0, 10]]):
        np.save(tmp_path / "a.offsets.npy", np.array(offsets))
        with pytest.raises(ConfigError, match=r"a\.offsets\.npy: expected ascending offsets from 0 to 10"):
            open_sources(section(kind="tokens", path=str(tmp_path)))


def test_a_pickled_array_is_never_loaded(tmp_path, section):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="not a readable"):
        open_sources(section(kind="tokens", path=str(tmp_path)))


def test_all_missing_files_are_reported_together(tmp_path):
    sources = (SourceConfig(path=str(tmp_path / "a")), SourceConfig(path=str(tmp_path / "b"), kind="jsonl"))
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(sources=sources, tokenizer=str(tmp_path / "t.json")))
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "data.sources[0].path",
        "data.sources[1].path",
        "data.tokenizer",
    ]


def test_records_without_text_are_counted_and_named_by_line(tmp_path, section, capsys):
    lines = [json.dumps({"text": f"document {i}" if i % 5 < 3 else ""}) for i in range(150)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = section(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    assert len(documents(config)) == 90
    said = capsys.readouterr().err
    assert f"60 records without text (the first: {tmp_path / 'a.jsonl'}:4)" in said
    (source,) = open_stream(config).sources()  # the cache is warm now
    assert (source.documents, dict(source.dropped)) == (90, {"records without text": 60})


BAD_RECORDS = ["{", "[1]", '{"other": "x"}', '{"text": null}', '{"text": "\\ud800"}']


@pytest.mark.parametrize("record", BAD_RECORDS)
def test_a_record_that_cannot_be_read_stops_or_is_skipped(tmp_path, section, capsys, record):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(['{"text": "one"}', record, '{"text": "two"}']))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .*data\.on_error = \"skip\""):
        documents(section(kind="jsonl", path=str(path)))
    skipping = section(kind="jsonl", path=str(path), on_error="skip")
    assert documents(skipping) == ["one", "two"]
    assert "1 records that cannot be read (the first: " in capsys.readouterr().err
    (source,) = open_stream(skipping).sources()
    assert dict(source.dropped) == {"records that cannot be read": 1}


def test_a_file_that_is_no_text_stops_or_is_skipped(tmp_path, section):
    for name, content in {"a.txt": b"one", "b.txt": b"\xff\xfe", "c.txt": b"three"}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"b\.txt is not UTF-8 .*data\.on_error = \"skip\""):
        documents(section(kind="text", path=str(tmp_path)))
    skipping = section(kind="text", path=str(tmp_path), on_error="skip")
    assert documents(skipping) == ["one", "three"]
    (source,) = open_stream(skipping).sources()
    assert dict(source.dropped) == {"records that cannot be read": 1}


def test_of_a_file_that_is_cut_only_documents_that_are_no_text_are_left_out(tmp_path, section, monkeypatch):
    monkeypatch.setattr("fsdmoe.data.readers._BLOCK_BYTES", 3)
    (tmp_path / "a.txt").write_bytes("zw\u00f6lf|".encode() + b"\xff\xfe|three|\xe2")
    skipping = section(kind="text", path=str(tmp_path), separator="|", on_error="skip")
    assert documents(skipping) == ["zw\u00f6lf", "three"]
    (source,) = open_stream(skipping).sources()
    assert dict(source.dropped) == {"records that cannot be read": 2}


@pytest.mark.parametrize(("bad", "named"), [(300, "token 41"), (-1, "token 41")])
def test_a_bad_id_in_tokens_is_refused_before_the_first_step(tmp_path, section, bad, named):
    tokens = np.arange(60, dtype=np.int32)
    tokens[41] = bad
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(30, dtype=np.int32))
    np.save(folder / "b.npy", tokens)
    for _ in range(2):  # with the index in the cache, too
        with pytest.raises(ConfigError, match=rf"data\.vocab_size: .* got {bad} in .*b\.npy, {named}"):
            open_stream(section(kind="tokens", path=str(folder)))
    if bad > 0:
        assert open_stream(section(kind="tokens", path=str(folder), vocab_size=301)).vocab_size == 301


def test_sources_tell_their_weights_and_how_far_they_were_read(tmp_path, section):
    for name, size in (("a", 64), ("b", 192)):
        (tmp_path / f"{name}.txt").write_text("x" * (size - 1))
    kinds = [SourceConfig(path=str(tmp_path / f"{n}.txt"), weight=w, name=n) for n, w in (("a", 3), ("b", 1))]
    stream = open_stream(section(sources=tuple(kinds), shuffle=False))
    for _ in range(32):  # steps of two rows of 8 tokens
        stream.next_step()
    a, b = stream.sources()
    assert (a.name, a.documents, a.tokens, a.weight, b.weight) == ("a", 1, 64, 0.75, 0.25)
    assert a.tokens_read + b.tokens_read == 512, "as many as were handed out"
    assert (a.epochs, b.epochs) == (a.tokens_read / 64, b.tokens_read / 192)
    assert a.epochs >= 2


def test_ids_of_one_document_are_told_how_to_be_cut(tmp_path, section):
    np.save(tmp_path / "a.npy", np.arange(60, dtype=np.int32))
    with pytest.raises(
        ConfigError, match=r"^data\.holdout: all 1 .*of token ids data\.document_end, or a file x\."
    ):
        open_stream(section(kind="tokens", path=str(tmp_path / "a.npy"), holdout=0.5))
