"""Records of chats, completions and preferences: from files to what is learnt of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig, build_data
from fsdmoe.data.chat_records import Completion, Conversation, Preference, parse_record
from fsdmoe.data.sources import open_sources
from fsdmoe.data.tokenizer import ByteTokenizer
from fsdmoe.testing import requires_transformers
from tests.support.chat_tokenizers import marked

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "!"},
]


def parsed(kind: str, **record: Any) -> Any:
    return parse_record("data", "here", kind, record, "messages")


def section(tmp_path: Path, kind: str, records: list[Any], **keys: Any) -> DataConfig:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    fixed = {"cache_dir": str(tmp_path / "cache"), "seq_len": 256, "holdout": 0.0, "prefetch": 0}
    return DataConfig(kind=kind, path=str(path), **{**fixed, **keys})


def shown(config: DataConfig) -> list[str]:
    """Each document of a source, what carries loss in ⟦ ⟧."""
    (store,), _ = open_sources(config)
    documents = range(store.num_documents)
    return [
        marked(ByteTokenizer(), (store.read(i, 0, 9999), store.read_targets(i, 0, 9999))) for i in documents
    ]


def test_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parsed("chat", messages=[{"role": "user", "content": parts}])
    assert found.messages == ({"role": "user", "content": "ab"},)


def test_nulls_count_as_absent_and_a_message_of_calls_needs_no_content() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    found = parsed(
        "chat",
        messages=[
            {"role": "user", "content": "a", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        tools=None,
    )
    assert found == Conversation(
        "data.path: here",
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}),
    )


def test_tools_may_be_written_as_json() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parsed("chat", messages=TALK, tools=json.dumps(tools)).tools == tools


def test_the_prompt_of_a_completion_is_context() -> None:
    assert parsed("completion", prompt="a", completion="b") == Completion("a", "b")
    found = parsed("completion", prompt=TALK[:2], completion=TALK[2:3])
    assert (found.num_context, list(found.messages)) == (2, TALK[:3])


def test_a_preference_without_a_prompt_has_what_both_answers_begin_with() -> None:
    other = [*TALK[:2], {"role": "assistant", "content": "Go."}]
    found = parsed("preference", chosen=TALK[:3], rejected=other)
    assert found == parsed("preference", prompt=TALK[:2], chosen=TALK[2:3], rejected=other[2:])
    assert isinstance(found, Preference)
    assert [answer.num_context for answer in found] == [2, 2]  # type: ignore[union-attr]
    texts = parsed("preference", chosen="Q: 1 + 1? A: 2", rejected="Q: 1 + 1? A: 11")
    assert texts == Preference(Completion("Q: 1 + 1? A: ", "2"), Completion("Q: 1 + 1? A: ", "11"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"messages": "a"}, "expected a list of messages in `messages`, got 'a'"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "and a text `content`"),
    "no tools": ({"messages": TALK, "tools": "[1"}, "expected JSON in `tools`"),
    "wrong tools": ({"messages": TALK, "tools": ["a"]}, "expected a list of JSON schemas in `tools`"),
    "variables": ({"messages": TALK, "chat_template_kwargs": 1}, "expected a table of variables"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_is_no_chat_is_refused_with_its_place(case: str) -> None:
    record, message = BAD[case]
    with pytest.raises(ConfigError, match=rf"^data\.path: here: .*{message}.*; fix or remove the record$"):
        parsed("chat", **record)


def test_a_completion_of_text_and_messages_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected `prompt` and `completion` both as text or both as mess"):
        parsed("completion", prompt="a", completion=TALK)


@requires_transformers
def test_only_the_assistants_words_and_their_end_are_learnt(tmp_path: Path) -> None:
    assert shown(section(tmp_path, "chat", [{"messages": TALK}])) == [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello<|im_end|>⟧\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦!<|im_end|>⟧\n"
    ]


@requires_transformers
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_messages_that_are_marked_so_are_not_learnt(tmp_path: Path, mark: dict[str, Any]) -> None:
    marked_talk = [*TALK[:2], TALK[2] | mark, TALK[3], TALK[4] | {"weight": 1}]
    (found,) = shown(section(tmp_path, "chat", [{"messages": marked_talk}]))
    (plain,) = shown(section(tmp_path, "chat", [{"messages": TALK}]))
    assert found == plain.replace("⟦Hello<|im_end|>⟧", "Hello<|im_end|>")


def test_a_mark_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a `weight` of 0 or 1, .* in message 0, got 0\.5"):
        parsed("chat", messages=[{"role": "assistant", "content": "a", "weight": 0.5}])


@requires_transformers
def test_completions_are_learnt_with_their_end(tmp_path: Path) -> None:
    config = section(
        tmp_path,
        "completion",
        [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": TALK[:4], "completion": TALK[4:]}],
    )
    text, chat = shown(config)
    assert text == "1 + 1 =⟦ 2<|endoftext|>⟧"
    assert chat.endswith(
        "Hello<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦!<|im_end|>⟧\n"
    )
    assert chat.count("⟦") == 1, "an answer in the prompt is context"


@requires_transformers
@pytest.mark.parametrize(
    "record", [{"prompt": "a", "chosen": "bb", "rejected": "c"}, {"chosen": "abb", "rejected": "ac"}]
)
def test_a_pair_is_a_row_of_two_documents_with_loss_on_the_answers(
    tmp_path: Path, record: dict[str, str]
) -> None:
    config = section(
        tmp_path,
        "preference",
        [record],
        pack=False,
        seq_len=9,
        holdout=0.0,
    )
    with build_data(config, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=1, seed=0) as data:
        (batch,) = data.next_step()
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert batch.loss_mask_BS.tolist() == [[True, True, True, False, True, True, False, False, False]]
    a, b, c = b"abc"
    assert batch.tokens_BS[0, [0, 1, 2, 4, 5]].tolist() == [a, b, b, a, c]
    assert batch.labels_BS[0, [0, 1, 4]].tolist() == [b, b, c]


@requires_transformers
@pytest.mark.parametrize(
    ("role", "meant"), [("assitant", "assistant"), ("User", "user"), ("systm", "system")]
)
def test_a_misspelt_role_is_refused(tmp_path: Path, role: str, meant: str) -> None:
    records = [{"messages": TALK}, {"messages": [*TALK[:1], {"role": role, "content": "a"}]}]
    with pytest.raises(
        ConfigError, match=rf"a\.jsonl:2: message 1 has the role '{role}'; did you mean {meant}"
    ):
        open_sources(section(tmp_path, "chat", records))
    open_sources(section(tmp_path, "chat", records, chat_loss_roles=(role, "assistant")))


@requires_transformers
def test_records_without_loss_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    silent = {"messages": [TALK[1], {"role": "bot", "content": "a"}]}
    config = section(tmp_path, "chat", [{"messages": TALK}, silent, silent])
    for _ in ("tokenised", "cached"):
        (store,), _ = open_sources(config)
        assert store.num_documents == 3
        assert store.without_loss == (
            f"2 records without a token with loss (the first: {tmp_path}/a.jsonl:2, with turns of user, bot)"
        )
    assert open_sources(section(tmp_path, "chat", [{"messages": TALK}]))[0][0].without_loss == ""


@requires_transformers
def test_a_record_that_the_template_cannot_take_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    spelled = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}]
    records = [{"messages": TALK}, {"messages": spelled}]
    with pytest.raises(ConfigError, match=r"data\.path: .*a\.jsonl:2: a message spells the special token"):
        open_sources(section(tmp_path, "chat", records))
    (store,), _ = open_sources(section(tmp_path, "chat", records, on_error="skip"))
    assert (store.num_documents, store.dropped) == (1, {"records that cannot be read": 1})


@requires_transformers
def test_a_record_of_another_form_names_its_kind(tmp_path: Path) -> None:
    config = section(tmp_path, "chat", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError, match=r'no \'messages\' in the record, .*set data\.kind = "completion"'):
        open_sources(config)


@requires_transformers
@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "Add.\n1 1"}, {"from": "gpt", "value": "2"}]},
        {"instruction": "Add.", "input": "1 1", "output": "2"},
        {"instruction": "Add.\n1 1", "input": "", "output": "2", "history": []},
    ],
)
def test_records_of_sharegpt_and_alpaca_are_read_as_chats(record: dict[str, Any], tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "Add.\n1 1"}, {"role": "assistant", "content": "2"}
    system = {"role": "system", "content": "Be kind."}
    usual = [{"messages": [user, assistant]}, {"messages": [system, user, assistant]}]
    expected = shown(section(tmp_path, "chat", usual))
    assert shown(section(tmp_path, "chat", [record, {**record, "system": "Be kind."}])) == expected


@requires_transformers
@pytest.mark.parametrize(
    ("kind", "record", "said"),
    [
        ("chat", {"conversations": [{"from": "bard", "value": "a"}]}, r"`from` \(human, .* got .*bard"),
        ("chat", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "turns as `messages`"),
        ("completion", {"instruction": "a", "output": "b"}, r'data\.kind = "chat"'),
        ("jsonl", {"conversations": []}, r'data\.kind = "chat"'),
    ],
)
def test_what_is_wrong_with_records_of_sharegpt_and_alpaca_is_said(
    kind: str, record: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        open_sources(section(tmp_path, kind, [record]))


@requires_transformers
def test_another_template_is_another_data_set(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    prints = []
    for end in ("\n", "\n\n"):
        template.write_text(
            "{% for m in messages %}{{ m.role + ': ' + m.content + '" + repr(end)[1:-1] + "' }}{% endfor %}"
        )
        config = section(tmp_path, "chat", [{"messages": TALK}], chat_template=str(template))
        prints.append(open_sources(config)[0][0].fingerprint)
    assert prints[0] != prints[1]


@requires_transformers
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_loss_mask_of_a_batch_follows_the_turns(tmp_path: Path, suffix: str) -> None:
    config = section(tmp_path, "chat", [{"messages": TALK}] * 4)
    if suffix == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"messages": [TALK] * 4}), tmp_path / "a.parquet")
        (tmp_path / "a.jsonl").unlink()
        config = DataConfig(**{**vars(config), "path": str(tmp_path)})
    stream = build_data(config, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=1, seed=0)
    (batch,) = stream.next_step()
    text = ByteTokenizer().decode(batch.labels_BS[batch.loss_mask_BS].tolist())
    assert text.startswith("Hello<|im_end|>!<|im_end|>Hello<|im_end|>")
    before = batch.tokens_BS[batch.loss_mask_BS].tolist()
    assert ByteTokenizer().decode(before[:6]) == "\nHello", "each is asked of the token before it"
    assert not np.array(batch.labels_BS[~batch.loss_mask_BS]).any()
