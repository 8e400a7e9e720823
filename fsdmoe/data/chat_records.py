"""Records of chats: the messages, tools and fields that a chat template reads.

A record has one of three forms, by the kind of its source:

    chat         messages                      [{"role": "user", "content": "..."}, ...]
    completion   prompt, completion            two texts, or two lists of messages
    preference   [prompt,] chosen, rejected    texts or messages; without a prompt, what both begin with

A chat may also come as ShareGPT (`conversations` of `from` and `value`) or Alpaca (`instruction`, `input`,
`output`) writes it: :func:`with_messages`.

Next to these a record may have `tools`, a list of JSON schemas, and `chat_template_kwargs`, further variables
of the template. A message may have more than role and content: `tool_calls`, `reasoning_content`, whatever
the template knows. Its `null`s count as absent, since tables of records fill columns with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdmoe.core.errors import ConfigError

Message = dict[str, Any]
FIELDS = {"chat": ("messages",), "completion": ("prompt", "completion"), "preference": ("chosen", "rejected")}
"""What a record of each kind must have."""
OPTIONAL_FIELDS = ("prompt", "tools", "chat_template_kwargs")
OTHER_FORMS = ("conversations", "instruction", "input", "output", "system", "history")
"""What chats of other tools may have."""
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""The roles of ShareGPT's `from`."""

# Roles are written into the markup, where a marker would be special: a record must not insert one.
_ROLE = re.compile(r"[\w-]+")


_MARKS = ("weight", "train")


class Conversation(NamedTuple):
    """Messages for a template."""

    where: str
    """How messages about it begin: the key and the record's place."""
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    """Of the template, besides messages and tools."""
    num_context: int = 0
    """How many of the messages are only context: they never carry loss."""
    unlearnt: frozenset[int] = frozenset()
    """Messages that their record marks so: ``weight`` of 0, or ``train`` of false."""


class Completion(NamedTuple):
    """A text to go on from, and how it goes on."""

    prompt: str
    completion: str


class Preference(NamedTuple):
    """Two answers to the same prompt, the better one first."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


Content = str | Conversation | Completion | Preference


def parse_record(key: str, where: str, kind: str, record: Mapping[str, Any], field: str) -> Content:
    """The chat of a record that has the fields of its kind; `field` holds the messages of a `chat`."""
    if kind == "chat":
        return _Parser(key, where, record).conversation(field, [], record[field])
    if kind == "completion":
        return _Parser(key, where, record).answer(record["prompt"], "completion", record["completion"])
    chosen, rejected = record["chosen"], record["rejected"]
    prompt = record.get("prompt")
    if prompt is None:
        prompt, chosen, rejected = _shared_beginning(chosen, rejected)
    answers = {"chosen": chosen, "rejected": rejected}
    parser = _Parser(key, where, record)
    return Preference(*(parser.answer(prompt, name, value) for name, value in answers.items()))


def with_messages(record: dict[str, Any]) -> dict[str, Any]:
    """A chat of ShareGPT or Alpaca as a record that has `messages`; any other record as it is."""
    if "messages" in record or record.get("history"):  # nobody says which turns of a history carry loss
        return record
    if "conversations" in record:
        turns = record["conversations"]
    elif {"instruction", "output"} <= record.keys():
        asked = [text for text in (record["instruction"], record.get("input")) if text]
        content = "\n".join(asked) if all(isinstance(text, str) for text in asked) else None
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": record["output"]}]
    else:
        return record
    if record.get("system") and isinstance(turns, list):
        turns = [{"role": "system", "content": record["system"]}, *turns]
    return {**record, "messages": turns}


def texts_of(content: Content) -> list[str]:
    """All text of a chat, to measure and to check."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, Completion):
        return [*content]
    if isinstance(content, Preference):
        return [text for answer in content for text in texts_of(answer)]
    return [json.dumps([content.messages, content.tools], ensure_ascii=False)]


def without_nulls(value: Any) -> Any:
    """A value of a table, where keys that some rows have are null in all others."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


class _Parser:
    """Reads the fields of one record."""

    def __init__(self, key: str, where: str, record: Mapping[str, Any]) -> None:
        self._key = key
        self._where = where
        self._record = record

    def answer(self, prompt: Any, name: str, value: Any) -> Conversation | Completion:
        """A prompt and what follows it: both texts, or both messages."""
        if isinstance(prompt, str) and isinstance(value, str):
            return Completion(prompt, value)
        if not isinstance(prompt, list) or not isinstance(value, list):
            raise self._refused(f"`prompt` and `{name}` both as text or both as messages", [prompt, value])
        return self.conversation(name, prompt, value)

    def conversation(self, name: str, context: list[Any], value: Any) -> Conversation:
        if not isinstance(value, list) or not value:
            raise self._refused(f"a list of messages in `{name}`", value)
        given = [*context, *value]
        unlearnt = frozenset(n for n, each in enumerate(given) if not self._is_learnt(n, each))
        messages = tuple(self._message(n, each) for n, each in enumerate(given))
        where = f"{self._key}.path: {self._where}"
        variables = self._record.get("chat_template_kwargs")
        if not isinstance(variables, dict | None):
            raise self._refused("a table of variables in `chat_template_kwargs`", variables)
        return Conversation(where, messages, self._tools(), variables, len(context), unlearnt)

    def _is_learnt(self, number: int, value: Any) -> bool:
        """By a message's ``weight`` (OpenAI's, 0 or 1) and ``train``."""
        if not isinstance(value, dict):
            return True
        marks = [value[name] for name in _MARKS if value.get(name) is not None]
        if wrong := [mark for mark in marks if mark not in (0, 1)]:
            raise self._refused(f"a `weight` of 0 or 1, or a `train` of true or false, in message {number}",
                                wrong[0])  # fmt: skip
        return all(marks)

    def _message(self, number: int, value: Any) -> Message:
        message = (
            {name: each for name, each in value.items() if each is not None and name not in _MARKS}
            if isinstance(value, dict)
            else {}
        )
        if message.keys() == {"from", "value"}:  # ShareGPT's
            message = {"role": _SPEAKERS.get(str(message["from"])), "content": message["value"]}
        role, content = message.get("role"), _content(message)
        if not isinstance(role, str) or not _ROLE.fullmatch(role) or content is None:
            raise ConfigError(
                f"{self._key}.path: {self._where}: message {number} needs a `role` (one word) and a text "
                f"`content`, or ShareGPT's `from` ({', '.join(_SPEAKERS)}) and `value`, got {value!r:.80}; "
                "fix or remove the record"
            )
        return {**message, "content": content}

    def _tools(self) -> list[dict[str, Any]] | None:
        tools = self._record.get("tools") or None
        if isinstance(tools, str):
            # Columns of a table cannot hold schemas that differ, so they are text there.
            try:
                tools = json.loads(tools) or None
            except ValueError as error:
                raise self._refused("JSON in `tools`", tools) from error
        if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            return tools
        raise self._refused("a list of JSON schemas in `tools`", tools)

    def _refused(self, expected: str, got: Any) -> ConfigError:
        return ConfigError(
            f"{self._key}.path: {self._where}: expected {expected}, got {got!r:.60}; fix or remove the record"
        )


def _content(message: Message) -> str | None:
    """Text, or text parts. A message that only calls tools has none, which templates take as an empty one."""
    value = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(value, str) or not isinstance(value, list):
        return value if isinstance(value, str) else None
    parts = [part.get("text") if isinstance(part, dict) else None for part in value]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def _shared_beginning(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """A pair without a prompt: the messages or the text that both begin with, and what is left of each."""
    if not any(isinstance(chosen, kind) and isinstance(rejected, kind) for kind in (list, str)):
        return ("", chosen, rejected) if isinstance(chosen, str) else ([], chosen, rejected)
    most = min(len(chosen), len(rejected)) - 1  # what differs is an answer, if only in its end
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), max(most, 0))
    return chosen[:shared], chosen[shared:], rejected[shared:]
