"""Fine-tuning records: what is written, and what is learnt of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fsdmoe.data import DataConfig, build_data
from fsdmoe.data.chat import ChatEncoder, Turn, parse_conversation
from fsdmoe.data.config import CHATML
from fsdmoe.data.tokenizer import ByteTokenizer

TALK = (Turn("system", "Be kind."), Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("assistant", "!"))


def learnt_text(encoder: ChatEncoder, talk=TALK) -> str:
    tokens, targets = encoder.encode(talk)
    return ByteTokenizer().decode(tokens[targets == 1].tolist())


def test_a_conversation_is_written_in_the_template_with_special_tokens():
    tokens, targets = ChatEncoder(ByteTokenizer(), CHATML, ("assistant",)).encode(TALK[:2])
    assert ByteTokenizer().decode(tokens.tolist()) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert (tokens > 255).sum() == 4
    assert len(targets) == len(tokens)


def test_only_the_assistants_words_and_their_end_are_learnt():
    assert learnt_text(ChatEncoder(ByteTokenizer(), CHATML, ("assistant",))) == "Hello<|im_end|>!<|im_end|>"


def test_other_roles_are_learnt_on_request():
    assert learnt_text(ChatEncoder(ByteTokenizer(), CHATML, ("user",))) == "Hi<|im_end|>"
    everything = learnt_text(ChatEncoder(ByteTokenizer(), CHATML, ()))
    assert everything == "Be kind.<|im_end|>Hi<|im_end|>Hello<|im_end|>!<|im_end|>"


def test_a_message_cannot_write_special_tokens():
    tokens, _ = ChatEncoder(ByteTokenizer(), CHATML, ()).encode((Turn("user", "<|im_end|>"),))
    assert (tokens > 255).sum() == 2


def test_another_template_is_followed():
    encoder = ChatEncoder(ByteTokenizer(), "{role}: {content}\n", ("assistant",))
    tokens, _ = encoder.encode(TALK[1:3])
    assert ByteTokenizer().decode(tokens.tolist()) == "user: Hi\nassistant: Hello\n"
    assert learnt_text(encoder) == "Hello!"


def test_content_may_come_in_text_parts():
    value = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert parse_conversation("data", "here", value) == (Turn("user", "ab"),)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_loss_mask_of_a_batch_follows_the_turns(tmp_path, suffix):
    talk = [{"role": turn.role, "content": turn.content} for turn in TALK]
    if suffix == "jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 4))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"messages": [talk] * 4}), tmp_path / "a.parquet")
    config = DataConfig(
        kind="chat",
        path=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        seq_len=256,
        holdout=0.0,
        prefetch=0,
    )
    stream = build_data(config, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=1, seed=0)
    (batch,) = stream.next_step()
    labels = batch.labels_BS[batch.loss_mask_BS].tolist()
    text = ByteTokenizer().decode(labels)
    assert text.startswith("Hello<|im_end|>!<|im_end|>Hello<|im_end|>")
    before = batch.tokens_BS[batch.loss_mask_BS].tolist()
    assert ByteTokenizer().decode(before[:6]) == "\nHello", "each is asked of the token before it"
    assert not np.array(batch.labels_BS[~batch.loss_mask_BS]).any()
