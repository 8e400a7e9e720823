"""The command that shows a data set."""

from __future__ import annotations

import json
import re

import pytest

from fsdmoe.data.__main__ import main
from fsdmoe.testing import requires_transformers
from tests.support.chat_tokenizers import assistant, build_tokenizer, released_template, user
from tests.support.hf_tiny import tiny_config


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["python -m fsdmoe.data", *arguments])
    main()


def test_it_shows_the_sources_a_row_and_a_rate(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("|".join(f"text number {i}" for i in range(50)))
    (tmp_path / "run.toml").write_text(
        f'[data]\nseq_len = 32\ncache_dir = "{tmp_path}/cache"\n'
        f'[[data.sources]]\nkind = "text"\npath = "{tmp_path}/a.txt"\nseparator = "|"\nname = "numbers"\n'
    )
    run(monkeypatch, "--config", str(tmp_path / "run.toml"), "--steps", "3")
    output = capsys.readouterr().out
    assert "numbers: 50 documents, 740 tokens" in output
    assert "ext number" in output, "the first byte is not predicted"
    assert "M tokens/s" in output


@pytest.mark.parametrize("text", ["[data]\nseq_len = 1", "[data]\nunknown = 1", "not toml ="])
def test_a_wrong_file_ends_with_a_plain_line_and_code_2(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--config", str(tmp_path / "run.toml"))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(("data.", "--config: "))


@requires_transformers
def test_a_model_folder_is_previewed_with_its_own_tokenizer(tmp_path, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tiny_config("qwen3_moe", vocab_size=600).save_pretrained(tmp_path / "hf")
    words = {"<|endoftext|>": 0, "?": 1} | {f"word{i}": i for i in range(2, 600)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(f"word{i}" for i in range(2, 100)))
    (tmp_path / "run.toml").write_text(
        f'[model]\nhf = "{tmp_path}/hf"\n[mesh]\nep = 4\n[data]\nkind = "text"\npath = "{tmp_path}/a.txt"\n'
        f'seq_len = 16\nholdout = 0.0\ncache_dir = "{tmp_path}/cache"\n'
    )
    run(monkeypatch, "--config", str(tmp_path / "run.toml"), "--steps", "1", "--global-batch-size", "4")
    output = capsys.readouterr().out
    assert "vocabulary 600" in output, "the byte tokenizer has 264"
    assert "99 tokens" in output
    assert "word2 ⟦word3 word4" in output or "⟦ word3 word4" in output


@requires_transformers
def test_the_loss_of_a_chat_is_shown_where_it_is(tmp_path, monkeypatch, capsys):
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day \x1b[31m"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(20)))
    (tmp_path / "run.toml").write_text(
        f'[data]\nkind = "chat"\npath = "{tmp_path}/chat.jsonl"\nseq_len = 128\nholdout = 0.0\n'
        f'cache_dir = "{tmp_path}/cache"\n[train]\nglobal_batch_size = 2\nmicro_batch_size = 1\n'
    )
    config = ["--config", str(tmp_path / "run.toml"), "--steps", "1"]
    run(monkeypatch, *config)
    output = capsys.readouterr().out
    assert "⟦Good day \\x1b[31m<|im_end|>⟧⏎" in output, "answers carry loss, and nothing reaches the terminal"
    assert "<|im_start|>user⏎\n    Hello?<|im_end|>⏎" in output, "questions do not"
    assert re.search(r"row 1: 128 tokens, \d documents?, \d+ with loss \(\d+\.\d %\)", output)
    assert re.search(r"\n  padding: \d+ tokens\n", output), "the next chat does not fit"
    assert "are cut" not in output
    assert "without a token" not in output
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write(json.dumps({"messages": chat[:1]}) + "\n")
    run(monkeypatch, *config)
    assert "  1 records without a token with loss (the first: " in capsys.readouterr().out
    run(monkeypatch, *config, "--show", "3", "--data.seq_len", "32", "--data.chat_loss_roles", "user")
    output = capsys.readouterr().out
    assert "row 3: 32 tokens" in output
    assert "  20 (95.2 %) are longer than data.seq_len and are cut; raise it, or shorten them" in output
    assert "⟦user⏎\n    Hello?<|im_end|>⟧" in output, "the whole turn, but for the first token of a document"


@requires_transformers
def test_a_chat_is_shown_as_the_models_own_template_writes_it(tmp_path, monkeypatch, capsys):
    tokenizer = build_tokenizer("qwen", released_template("qwen3"))
    tiny_config("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    record = {"messages": [user("Rome?"), assistant("Sunny.", reasoning_content="I think")]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(record) + "\n") * 20)
    (tmp_path / "run.toml").write_text(
        f'[model]\nhf = "{tmp_path}/hf"\n[data]\nkind = "chat"\npath = "{tmp_path}/chat.jsonl"\n'
        f'seq_len = 64\nholdout = 0.0\ncache_dir = "{tmp_path}/cache"\n'
    )
    run(monkeypatch, "--config", str(tmp_path / "run.toml"), "--steps", "0", "--global-batch-size", "4")
    shown = "assistant⏎ ⟦<think>⏎ I think⏎ </think>⏎ ⏎ Sunny.<|im_end|>⟧⏎"
    assert shown in " ".join(capsys.readouterr().out.split())


@requires_transformers
def test_pairs_are_shown_one_below_the_other(tmp_path, monkeypatch, capsys):
    prompt = [{"role": "user", "content": "Hello?"}]
    answers = {name: [{"role": "assistant", "content": f"The {name} one"}] for name in ("chosen", "rejected")}
    (tmp_path / "pairs.jsonl").write_text((json.dumps({"prompt": prompt, **answers}) + "\n") * 3)
    (tmp_path / "run.toml").write_text(
        f'[data]\nkind = "preference"\npack = false\npath = "{tmp_path}/pairs.jsonl"\n'
        f'cache_dir = "{tmp_path}/cache"\n'
    )
    run(monkeypatch, "--config", str(tmp_path / "run.toml"), "--show", "2")
    output = capsys.readouterr().out
    assert "pairs.jsonl: 3 pairs" in output
    for pair in (1, 2):
        for name in answers:
            after = output.partition(f"pair {pair}, {name}: ")[2]
            assert after.partition("⟦")[2].startswith(f"The {name} one<|im_end|>⟧")
    assert "pair 3" not in output


def test_a_misspelt_option_of_its_own_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "--shwo", "2")
    assert end.value.code == 2
    assert "--shwo: unknown option; did you mean --show?" in capsys.readouterr().err
