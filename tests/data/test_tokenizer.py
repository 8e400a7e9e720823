"""The byte tokenizer, and tokenizer.json files."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.config import DataConfig
from fsdmoe.data.sources import check_data, open_sources
from fsdmoe.data.tokenizer import ByteTokenizer, load_tokenizer


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip_any_text(text):
    (tokens,) = ByteTokenizer().encode_batch([text])
    assert ByteTokenizer().decode(tokens.tolist()) == text
    assert tokens.dtype == np.uint16
    assert len(tokens) == len(text.encode())


def test_text_that_spells_a_special_token_stays_text():
    (tokens,) = ByteTokenizer().encode_batch(["<|endoftext|>"])
    assert tokens.max() < 256


@pytest.fixture
def tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"])
    backend.enable_truncation(4)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_a_tokenizer_json_is_read_without_its_truncation(tokenizer_json):
    tokenizer = load_tokenizer(str(tokenizer_json.parent))
    (tokens,) = tokenizer.encode_batch(["a longer text than four tokens"])
    assert tokenizer.decode(tokens.tolist()) == "a longer text than four tokens"
    assert tokenizer.vocab_size == 260
    assert tokenizer.eos_id == 256
    assert tokenizer.bos_id is None


@pytest.mark.parametrize("stated", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_the_end_of_text_is_the_one_that_the_folder_states(tokenizer_json, stated):
    config = tokenizer_json.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": stated}))
    assert load_tokenizer(str(tokenizer_json)).eos_id == 258
    assert load_tokenizer(str(tokenizer_json), eos_token="<|endoftext|>").eos_id == 256
    config.write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(str(tokenizer_json)).eos_id == 256


def test_a_token_that_the_tokenizer_would_begin_with_and_the_run_does_not_is_told(tokenizer_json, caplog):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    begin = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 259)]
    )
    folder = tokenizer_json.parent
    (folder / "a.txt").write_text("ab")

    def told(kind: str = "text", bos_token: str = "") -> str:
        caplog.clear()
        check_data(
            DataConfig(
                kind=kind, path=str(folder / "a.txt"), tokenizer=str(tokenizer_json), bos_token=bos_token
            )
        )
        return caplog.text

    assert told() == ""
    backend.post_processor = begin
    backend.save(str(tokenizer_json))
    assert 'write bos_token = "<bos>"' in told()
    assert told(bos_token="<bos>") == ""
    assert load_tokenizer(str(tokenizer_json)).encode_batch(["a"])[0].size == 1


def test_an_answer_is_encoded_with_its_prompt(tmp_path):
    """By the pipeline of Llama-2's and Mixtral's tokenizers, which put a space before every text."""
    tokenizers = pytest.importorskip("tokenizers")
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    words = {c: i for i, c in enumerate("▁</s>print(helo)1+=2")} | {"</s>": 50}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    for prompt, answer in (("print(", "hello)"), ("1 + 1 =", " 2"), ("", "hello")):
        tokens, first = tokenizer.encode_answer(prompt, answer)
        assert tokenizer.decode(tokens.tolist()).replace(" ", "") == (prompt + answer).replace(" ", "")
        assert tokenizer.decode(tokens[first:].tolist()).strip() == answer.strip()
        assert tokens.tolist().count(0) == 1 + (prompt + answer).count(" ")


def test_special_tokens_in_text_stay_text(tokenizer_json):
    (tokens,) = load_tokenizer(str(tokenizer_json)).encode_batch(["<|im_end|>"])
    assert tokens.max() < 256


def test_documents_get_the_named_ends(tokenizer_json, tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    config = DataConfig(
        kind="text",
        path=str(tmp_path / "a.txt"),
        tokenizer=str(tokenizer_json),
        eos_token="<|im_end|>",
        bos_token="<bos>",
        cache_dir=str(tmp_path / "cache"),
    )
    (store,), vocab_size = open_sources(config)
    tokens = store.read(0, 0, 99).tolist()
    assert vocab_size == 260
    assert (tokens[0], tokens[-1], len(tokens)) == (259, 258, 4)


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
def test_an_unknown_end_is_refused_with_the_choices(tokenizer_json, key):
    with pytest.raises(ConfigError, match=rf"data\.{key}: '<no>' .* <\|endoftext\|>, <\|im_start\|>"):
        load_tokenizer(str(tokenizer_json), **{key: "<no>"})


def test_a_tokenizer_without_an_end_of_text_asks_for_one(tokenizer_json):
    for name in ("<|endoftext|>", "<|im_end|>"):
        tokenizer_json.write_text(tokenizer_json.read_text().replace(name, name.replace("e", "u")))
    with pytest.raises(ConfigError, match=r"data\.eos_token: .* has no end-of-text token"):
        load_tokenizer(str(tokenizer_json))


@pytest.mark.parametrize(
    ("library", "module", "extra"),
    [
        ("tokenizers", "hf_tokenizer", "data"),
        ("pyarrow", "parquet", "data"),
        ("datasets", "hf_dataset", "datasets"),
        ("transformers", "chat_template", "hf"),
    ],
)
def test_a_missing_library_names_the_extra_to_install(library, module, extra):
    code = f"""
import sys, types
package = types.ModuleType("fsdmoe.data")
package.__path__ = {[str(p) for p in sys.modules["fsdmoe.data"].__path__]!r}
sys.modules["fsdmoe.data"] = package
sys.modules["{library}"] = None
import fsdmoe.data.{module}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'fsdmoe[{extra}]'" in done.stderr


def test_special_tokens_of_a_prompt_are_special() -> None:
    assert load_tokenizer("bytes").encode_prompt("a<|im_end|>b<|x|>") == [97, 258, 98, *b"<|x|>"]
