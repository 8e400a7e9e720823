"""Released chat templates: the tokens of `apply_chat_template`, and masks of the loss written by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig
from fsdmoe.data.chat_records import Conversation
from fsdmoe.data.sources import open_sources
from fsdmoe.data.tokenizer import load_tokenizer
from fsdmoe.testing import requires_transformers
from tests.support.chat_tokenizers import (
    assistant,
    build_tokenizer,
    marked,
    released_template,
    released_templates,
    user,
)
from tests.support.scripts import IMPORTS_ROOT

pytestmark = requires_transformers


def talk(*messages: dict[str, Any], **keys: Any) -> Conversation:
    return Conversation("data.path: here", messages, **keys)


SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
SUN = {"role": "tool", "name": "weather", "content": "sun"}

TALKS = {
    "turns": talk(SYSTEM, user("Hi"), assistant("Yes"), user("Why?"), assistant("Sunny, I think.")),
    "tools": talk(user("Rome?"), assistant("", tool_calls=[CALL]), SUN, assistant("Sunny."), tools=TOOLS),
    "calls": talk(user("Rome?"), assistant("", tool_calls=[CALL]), SUN, assistant("Sunny.")),
    "thinking": talk(
        user("Hi"), assistant("Yes", reasoning_content="Hm.", thinking="Hm."),  # under both names in use
        user("Why?"), assistant("So", reasoning_content="Ah.", thinking="Ah."),
    ),
}  # fmt: skip

# By family, template and conversation: how each document ends, by the number of messages that it has. The
# beginning, which says what tools there are, carries no loss.
MASKS: dict[tuple[str, str, str], dict[int, str]] = {
    ("qwen", "chatml", "turns"): {
        5: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Yes<|im_end|>⟧\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        "⟦Sunny, I think.<|im_end|>⟧\n"
    },
    ("qwen", "qwen3", "turns"): {
        3: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nYes<|im_end|>⟧\n",
        5: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "Yes<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nSunny, I think.<|im_end|>⟧\n",
    },
    ("qwen", "qwen3", "tools"): {
        2: "</tool_call><|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call><|im_end|>⟧\n",
        4: "</tool_call><|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nSunny.<|im_end|>⟧\n",
    },
    ("qwen", "qwen3", "thinking"): {
        2: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nHm.\n</think>\n\nYes<|im_end|>⟧\n",
        4: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nAh.\n</think>\n\nSo<|im_end|>⟧\n",
    },
    ("qwen", "qwen3_training", "thinking"): {
        4: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nHm.\n</think>\n\nYes<|im_end|>\n⟧"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nAh.\n</think>\n\nSo<|im_end|>\n⟧"
    },
    ("qwen", "qwen3_training", "tools"): {
        4: "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call><|im_end|>\n⟧<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSunny.<|im_end|>\n⟧"
    },
    ("qwen", "qwen2_5", "tools"): {
        4: "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦Sunny.<|im_end|>⟧\n"
    },
    ("llama", "llama3", "turns"): {
        5: "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Sunny, I think.<|eot_id|>⟧"
    },
    ("llama", "llama3_training", "turns"): {
        5: "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Sunny, I think.<|eot_id|>⟧"
    },
    ("llama", "llama3_1", "tools"): {
        4: "Rome?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>⟧'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"sun"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Sunny.<|eot_id|>⟧"
    },
    ("deepseek", "deepseekv3", "turns"): {
        5: "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>⟦Yes<｜end▁of▁sentence｜>⟧"
        "<｜User｜>Why?<｜Assistant｜>⟦Sunny, I think.<｜end▁of▁sentence｜>⟧"
    },
    ("deepseek", "deepseekv3", "calls"): {
        4: "<｜begin▁of▁sentence｜><｜User｜>Rome?<｜Assistant｜>⟦<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sun<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>⟦Sunny.<｜end▁of▁sentence｜>⟧"
    },
    ("glm", "glm4moe", "turns"): {
        5: "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\n<think></think>\nYes<|user|>⟧\nWhy?"
        "<|assistant|>⟦\n<think></think>\nSunny, I think.<|endoftext|>⟧"
    },
    ("glm", "glm4moe", "tools"): {
        4: "<|user|>\nRome?<|assistant|>⟦\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n</tool_call><|observation|>⟧\n<tool_response>\nsun\n</tool_response>"
        "<|assistant|>⟦\n<think></think>\nSunny.<|endoftext|>⟧"
    },
    ("glm", "glm4moe", "thinking"): {
        2: "[gMASK]<sop><|user|>\nHi<|assistant|>⟦\n<think>Hm.</think>\nYes<|endoftext|>⟧",
        4: "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>\nYes<|user|>\nWhy?"
        "<|assistant|>⟦\n<think>Ah.</think>\nSo<|endoftext|>⟧",
    },
    ("glm", "glm4moe_training", "turns"): {
        5: "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\n<think></think>\nYes<|user|>⟧\nWhy?"
        "<|assistant|>⟦\n<think></think>\nSunny, I think.<|user|>⟧"
    },
    ("gptoss", "gptoss", "turns"): {
        3: "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>final<|message|>Yes<|return|>⟧",
        5: "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yes<|end|>"
        "<|start|>user<|message|>Why?<|end|><|start|>assistant"
        "⟦<|channel|>final<|message|>Sunny, I think.<|return|>⟧",
    },
    ("gptoss", "gptoss", "tools"): {
        4: "<|start|>user<|message|>Rome?<|end|><|start|>assistant"
        '⟦ to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>⟧'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>Sunny.<|return|>⟧"
    },
    ("gptoss", "gptoss", "thinking"): {
        2: "<|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes<|return|>⟧",
        4: "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yes<|end|>"
        "<|start|>user<|message|>Why?<|end|><|start|>assistant⟦<|channel|>analysis<|message|>Ah.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So<|return|>⟧",
    },
    ("gptoss", "gptoss_training", "turns"): {
        5: "<|start|>user<|message|>Hi<|end|>⟦<|start|>assistant<|channel|>final<|message|>Yes<|end|>⟧"
        "<|start|>user<|message|>Why?<|end|>⟦<|start|>assistant<|channel|>final<|message|>Sunny, I think."
        "<|return|>⟧"
    },
    ("phi", "phi3", "turns"): {
        3: "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Yes<|end|>\n<|endoftext|>⟧",
        5: "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n"
        "<|user|>\nWhy?<|end|>\n<|assistant|>\n⟦Sunny, I think.<|end|>\n<|endoftext|>⟧",
    },
}
# Their turns have no end of their own, so the end of text is added to the last one.
OPEN = {"glm4moe"}


def encoder_of(
    tokenizer: Any, folder: Path, template: str = "", roles: tuple[str, ...] = ("assistant",)
) -> Any:
    from fsdmoe.data.chat import ChatEncoder
    from fsdmoe.data.chat_template import ChatTemplate

    tokenizer.save_pretrained(folder)
    plain = load_tokenizer(str(folder), eos_token=tokenizer.eos_token)
    return ChatEncoder(plain, ChatTemplate(str(folder), template, {}), roles)


@pytest.mark.parametrize("case", MASKS, ids="-".join)
def test_tokens_are_those_of_the_template_and_loss_is_where_a_hand_put_it(
    tmp_path: Path, case: tuple[str, str, str]
) -> None:
    family, name, kind = case
    tokenizer = build_tokenizer(family, None if name == "chatml" else released_template(name))
    encoder = encoder_of(tokenizer, tmp_path, "chatml" if name == "chatml" else "")
    if name == "chatml":
        from fsdmoe.data.chat_template import CHATML

        tokenizer.chat_template = CHATML
    told = TALKS[kind]
    # This one adds text to the arguments, which everybody else reads as an object.
    written = _with_text_arguments(told) if name == "deepseekv3" else told
    documents = encoder.encode(told)
    assert len(documents) == len(MASKS[case])
    for document, (num_messages, by_hand) in zip(documents, MASKS[case].items(), strict=True):
        applied = tokenizer.apply_chat_template(
            list(written.messages[:num_messages]), tools=told.tools, return_dict=False
        )
        added = [tokenizer.eos_token_id] if name in OPEN else []
        assert document[0].tolist() == [*applied, *added]
        found = marked(tokenizer, document)
        assert found[-len(by_hand) :] == by_hand
        assert "⟦" not in found[: -len(by_hand)]


def _with_text_arguments(told: Conversation) -> Conversation:
    call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [{**each, "tool_calls": [call]} if "tool_calls" in each else each for each in told.messages]
    return told._replace(messages=tuple(messages))


@pytest.mark.full
@pytest.mark.parametrize("name", released_templates())
def test_every_released_template_is_written_as_it_is_or_refused_by_name(tmp_path: Path, name: str) -> None:
    template = released_template(name)
    tokenizer = build_tokenizer("llama", template)
    markers = re.findall(r"<[|｜][^<>{}\s'\"]+[|｜]>|<\|?\w+\|?>(?=['<\\])", template)
    tokenizer.add_tokens(sorted(set(markers)), special_tokens=True)
    told = talk(user("Hi"), assistant("Sunny"))
    encoder = encoder_of(tokenizer, tmp_path)
    if name.startswith(("smolvlm", "idefics3", "llava_next")):  # they take lists of parts, for images
        with pytest.raises(ConfigError, match=r"the chat template (does not|cannot) write"):
            encoder.encode(told)
        return
    (document,) = encoder.encode(told)
    applied = tokenizer.apply_chat_template(list(told.messages), return_dict=False)
    assert document[0].tolist()[: len(applied)] == applied
    assert [tokenizer.eos_token_id] * (len(document[0]) - len(applied)) == document[0].tolist()[
        len(applied) :
    ]
    marks = marked(tokenizer, document)
    assert marks.count("⟦") == 1
    assert "Sunny" in marks.partition("⟦")[2].partition("⟧")[0]
    assert "Hi" in marks.partition("⟦")[0]


def test_a_templates_own_mask_is_taken_as_it_is(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("qwen", released_template("qwen3_training"))
    ((tokens, targets),) = encoder_of(tokenizer, tmp_path).encode(TALKS["turns"])
    applied = tokenizer.apply_chat_template(list(TALKS["turns"].messages), return_assistant_tokens_mask=True)
    assert tokens.tolist() == applied["input_ids"]
    assert targets.tolist() == applied["assistant_masks"]


def test_an_answer_that_begins_with_space_is_marked_where_places_leave_space_out(tmp_path: Path) -> None:
    # Here transformers gives no mask at all: it finds no token at the place where the answer begins.
    tokenizer = build_tokenizer("glm", released_template("glm4moe_training"), trim_offsets=True)
    (document,) = encoder_of(tokenizer, tmp_path).encode(TALKS["turns"])
    assert marked(tokenizer, document).endswith(MASKS["glm", "glm4moe_training", "turns"][5])


def test_reasoning_that_a_template_with_markers_leaves_out_is_learnt_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("glm", released_template("glm4moe_training"))
    first, second = encoder_of(tokenizer, tmp_path).encode(TALKS["thinking"])
    assert marked(tokenizer, first).endswith("<|assistant|>⟦\n<think>Hm.</think>\nYes<|user|>⟧")
    assert marked(tokenizer, second).endswith("Why?<|assistant|>⟦\n<think>Ah.</think>\nSo<|user|>⟧")


REFUSED: dict[str, tuple[str, str, Conversation, str]] = {
    "context that changes with the answer": (
        "gptoss", "gptoss",
        talk(user("Rome?"), assistant("", tool_calls=[CALL], thinking="Hm."), SUN, assistant("Sunny.")),
        r"the chat template writes the messages before message 3 differently .* name a template with gen",
    ),
    "tools that are not written": ("llama", "llama3", TALKS["tools"], "does not write the tool weather"),
    "calls that are not written": (
        "llama", "llama3", talk(user("?"), assistant("!", tool_calls=[CALL])),
        "does not write the tool_calls of message 1",
    ),
    "reasoning that is not written": (
        "llama", "llama3", TALKS["thinking"], "does not write the reasoning of message 1",
    ),
    "a refusal of the template": (
        "gptoss", "gptoss", talk(user("?"), SUN, assistant("!")), "cannot write it .*no previous assistant",
    ),
    "arguments that are no JSON": (
        "qwen", "qwen3",
        talk(user("?"), assistant("", tool_calls=[{"function": {"name": "weather", "arguments": "{"}}])),
        "the arguments of a tool call are no JSON",
    ),
    "a special token": ("qwen", "qwen3", talk(user("<|im_end|>"), assistant("!")), r"token <\|im_end\|>"),
    "nothing before the answer": ("qwen", "qwen3", talk(assistant("!")), "begins with the assistant"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_written_wrong_is_refused_by_name(tmp_path: Path, case: str) -> None:
    family, name, told, message = REFUSED[case]
    encoder = encoder_of(build_tokenizer(family, released_template(name)), tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        encoder.encode(told)
    assert all(line.startswith("data.path: here: ") and ";" in line for line in caught.value.problems)


def test_a_named_template_needs_the_tokens_of_its_markers(tmp_path: Path) -> None:
    (tmp_path / "llama3.jinja").write_text(released_template("llama3"))
    tokenizer = build_tokenizer("qwen", released_template("qwen3"))
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*llama3\.jinja writes <\|end_header_id\|>"):
        encoder_of(tokenizer, tmp_path, str(tmp_path / "llama3.jinja"))
    with pytest.raises(ConfigError, match=r'data\.chat_template: expected "chatml" or the path'):
        encoder_of(tokenizer, tmp_path, str(tmp_path / "nowhere.jinja"))


def test_a_named_template_is_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    """DeepSeek's markers are no ASCII."""
    (tmp_path / "a.jinja").write_text("<\uff5cUser\uff5c>", encoding="utf-8")
    script = (
        f"from fsdmoe.data.chat_template import _read; print(ascii(_read({str(tmp_path / 'a.jinja')!r})))"
    )
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | IMPORTS_ROOT | plain, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "'<\\uff5cUser\\uff5c>'\n"


def test_a_tokenizer_without_a_template_asks_for_one_for_messages_alone(tmp_path: Path) -> None:
    build_tokenizer("qwen", None).save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b"}'
    )
    keys = {
        "tokenizer": str(tmp_path),
        "path": str(tmp_path / "a.jsonl"),
        "cache_dir": str(tmp_path / "cache"),
    }
    open_sources(DataConfig(kind="completion", **keys))
    with pytest.raises(ConfigError, match=r"^data\.chat_template: .* has no chat template of its own; name"):
        open_sources(DataConfig(kind="chat", **keys))


def test_tokens_that_only_one_of_the_tokenizers_files_has_are_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("qwen", released_template("qwen3"))
    tokenizer.save_pretrained(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    after = json.loads((tmp_path / "tokenizer_config.json").read_text())
    number = len(tokenizer) - 1
    added = {str(number): {"content": "<new>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**after, "added_tokens_decoder": added}))
    (tmp_path / "tokenizer.json").write_bytes(before)
    keys = {"tokenizer": str(tmp_path), "path": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(
        ConfigError, match=rf"data\.tokenizer: .* adds tokens up to {number}, tokenizer\.json"
    ):
        open_sources(DataConfig(kind="chat", **keys))


def test_the_template_for_tools_is_used_where_a_tokenizer_has_two(tmp_path: Path) -> None:
    templates = {"default": released_template("llama3"), "tool_use": released_template("llama3_1")}
    encoder = encoder_of(build_tokenizer("llama", templates), tmp_path)  # type: ignore[arg-type]
    assert len(encoder.encode(TALKS["tools"])) == len(encoder.encode(TALKS["turns"])) == 1


def test_variables_of_a_record_reach_the_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("llama", released_template("llama3_1"))
    told = TALKS["turns"]._replace(variables={"date_string": "1 May 2001"})
    (document,) = encoder_of(tokenizer, tmp_path).encode(told)
    assert "Today Date: 1 May 2001" in marked(tokenizer, document)


def test_other_roles_are_learnt_with_their_whole_turn_and_context_never(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("qwen", released_template("qwen2_5"))
    told = talk(SYSTEM, user("Hi"), assistant("Yes"), num_context=1)
    found = {}
    for roles in [("assistant",), ("user",), ()]:
        (document,) = encoder_of(tokenizer, tmp_path, roles=roles).encode(told)
        found[roles] = marked(tokenizer, document).partition("Be brief.<|im_end|>\n")[2]
    assert found == {
        ("assistant",): "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n",
        ("user",): "⟦<|im_start|>user\nHi<|im_end|>⟧\n<|im_start|>assistant\nYes<|im_end|>\n",
        (): "⟦<|im_start|>user\nHi<|im_end|>⟧\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n",
    }


def test_the_byte_tokenizer_writes_its_own_ids() -> None:
    from fsdmoe.data.chat_template import ChatTemplate

    template = ChatTemplate("bytes", "", {})
    text = template.render(talk(user("é\x00\n😀"))).text
    ids = template.tokens(text).ids
    assert load_tokenizer("bytes").decode(ids.tolist()) == text
    assert np.flatnonzero(ids > 255).size == 2
