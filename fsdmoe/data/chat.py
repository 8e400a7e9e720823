"""Conversations to tokens, and which of them carry loss: what the assistant says, and where it stops.

A template with generation markers (`{% generation %}`) says itself what an assistant generates. Otherwise it
is found by comparison, turn by turn (loss on what is underlined):

    a generation prompt after the messages before   user: Hi<|end|>\\nassistant:
    the messages up to and with the turn            user: Hi<|end|>\\nassistant: Good day<|end|>\\n
                                                                            ~~~~~~~~~~~~~~~~
The closing marker is learnt with the answer, so that the model stops; the line break behind it, which the
template writes whatever the model says, is not. Where a turn ends without a marker, the marker that opens the
next turn ends it. The last one is ended by the end of text, the only token that is added to what the template
writes.

Some templates write a turn differently once others follow: they leave out its reasoning, or close it with
another marker. The model never generates a turn in that form. So each turn becomes a document of its own,
with the messages before it as context, as the model will see them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.chat_records import Completion, Content, Conversation, Message, Preference, texts_of
from fsdmoe.data.chat_template import ChatTemplate, IntArray
from fsdmoe.data.store import SECOND_BEGINS
from fsdmoe.data.token_types import TokenArray
from fsdmoe.data.tokenizer import Tokenizer

Document = tuple[TokenArray, npt.NDArray[np.uint8]]
"""Token ids, and for each whether it carries loss (1), or begins the second of a pair."""

_ASSISTANT = "assistant"
_ROLES = ("system", "developer", "user", _ASSISTANT, "tool", "function", "ipython")
_LIKENESS = 0.75
"""Of a role to one of these: what is as close is taken for a misspelt one."""


class LearntTurn(NamedTuple):
    """A turn that carries loss, in the text of the conversation up to it."""

    text: str
    start: int
    end: int
    """The range of it that carries loss."""
    is_closed: bool
    """Whether it ends with a special token of its own."""


class ChatEncoder:
    """Writes the records of one run."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, loss_roles: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._loss_roles = frozenset(loss_roles)

    @property
    def facts(self) -> list[Any]:
        """What decides the documents, next to the records and the tokenizer."""
        return [*self._template.facts, sorted(self._loss_roles)]

    def encode(self, content: Content) -> list[Document]:
        """The documents of a record: mostly one; of a preference the chosen one with the rejected one
        behind it, which never part."""
        if isinstance(content, Preference):
            (chosen, first), (rejected, second) = (self._whole(answer) for answer in content)
            second[0] = SECOND_BEGINS  # no token before it is its own: it has no loss
            return [(np.concatenate([chosen, rejected]), np.concatenate([first, second]))]
        if isinstance(content, Completion):
            return [self._completion(content)]
        assert isinstance(content, Conversation)
        return self._conversation(content)

    def _whole(self, answer: Conversation | Completion) -> Document:
        documents = self.encode(answer)
        if len(documents) > 1:
            assert isinstance(answer, Conversation)
            raise ConfigError(
                f"{answer.where}: the chat template writes turns of an answer differently once others "
                "follow, so the answer is no single document; give one assistant turn after the prompt"
            )
        return documents[0]

    def _completion(self, content: Completion) -> Document:
        whole, first = self._tokenizer.encode_answer(*content)
        head = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        tokens = np.concatenate([np.array(head, whole.dtype), whole, [self._tokenizer.eos_id]])
        targets = np.zeros(len(tokens), np.uint8)
        targets[len(head) + first :] = 1
        return tokens, targets

    def _conversation(self, talk: Conversation) -> list[Document]:
        spelled = self._template.spelled("".join(texts_of(talk)))
        if spelled is not None:
            raise ConfigError(
                f"{talk.where}: a message spells the special token {spelled}, which only the chat template "
                "may write; give reasoning and tool calls as fields of the message, or remove the record"
            )
        self._require_roles(talk)
        talk = self._template.with_arguments(talk)
        whole = self._template.render(talk)
        learnt = [
            number
            for number, message in enumerate(talk.messages)
            if number >= talk.num_context and (not self._loss_roles or message["role"] in self._loss_roles)
        ]
        is_all = not talk.unlearnt.intersection(learnt)
        learnt = [number for number in learnt if number not in talk.unlearnt]
        _require_context(talk, whole.text)
        by_markers = self._loss_roles == {_ASSISTANT} and not talk.num_context and is_all
        if by_markers and self._template.has_markers(talk):
            # A template may leave out the reasoning of earlier turns: then it is learnt turn by turn.
            is_complete = not any(_left_out(talk.messages[number], whole.text) for number in learnt)
            if is_complete:
                return [self._document(whole.text, whole.generated)]
        turns = [self._turn(talk, number) for number in learnt]
        if all(whole.text.startswith(turn.text[: turn.end]) for turn in turns):
            return [self._of_turns(whole.text, turns)]
        return [self._of_turns(turn.text, [turn]) for turn in turns]

    def _require_roles(self, talk: Conversation) -> None:
        """A template writes a misspelt role as any other, and nothing of its turn would be learnt."""
        for number, role in enumerate(message["role"] for message in talk.messages):
            if role in _ROLES or role in self._loss_roles or self._template.knows_role(talk, role):
                continue
            if close := difflib.get_close_matches(role.lower(), _ROLES, n=1, cutoff=_LIKENESS):
                raise ConfigError(
                    f"{talk.where}: message {number} has the role {role!r}; did you mean {close[0]}? Fix or "
                    "remove the record"
                )

    def _turn(self, talk: Conversation, number: int) -> LearntTurn:
        """Compares the conversation up to a turn with the one that asks for it."""
        text = self._template.render(talk, number + 1).text
        start = self._start(talk, number, text)
        if left_out := _left_out(talk.messages[number], text):
            raise ConfigError(
                f"{talk.where}: the chat template does not write the {left_out} of message {number}; name "
                "one that does (data.chat_template), or remove it from the record"
            )
        end = len(text.rstrip())
        is_closed = end > start and self._template.is_closed(text[:end])
        return LearntTurn(text, start, end if is_closed else len(text), is_closed)

    def _start(self, talk: Conversation, number: int, text: str) -> int:
        """Where what a turn adds to the text begins, after what asks for it."""
        is_assistant = talk.messages[number]["role"] == _ASSISTANT
        if number == 0 and is_assistant and self._loss_roles:
            raise ConfigError(
                f"{talk.where}: the conversation begins with the assistant, and nothing tells where its "
                "answer begins; put a message before it, or remove the record"
            )
        prompt = self._template.render(talk, number, prompt=is_assistant).text if number else ""
        if text.startswith(prompt):
            return len(prompt)
        if not text.startswith(self._template.render(talk, number).text):
            raise ConfigError(
                f"{talk.where}: the chat template writes the messages before message {number} differently "
                "with it than without it, so nothing tells where it begins; name a template with generation "
                "markers (data.chat_template), or remove the record"
            )
        # The prompt opens reasoning that the turn does not have. What they share, whole tokens, asks for it.
        written = self._template.tokens(text)
        shared = _common_prefix(written.ids, self._template.tokens(prompt).ids)
        return int(written.ends[shared - 1]) if shared else 0

    def _of_turns(self, text: str, turns: Sequence[LearntTurn]) -> Document:
        """A conversation, or one up to a turn, with loss on these turns and on what ends them."""
        ends = [
            turn.end if turn.is_closed else self._template.after_special(text, turn.end) for turn in turns
        ]
        ids, targets = self._document(
            text, [(turn.start, end) for turn, end in zip(turns, ends, strict=True)]
        )
        if turns and not turns[-1].is_closed and ends[-1] == len(text):
            return np.append(ids, self._tokenizer.eos_id), np.append(targets, np.uint8(1))
        return ids, targets

    def _document(self, text: str, ranges: Sequence[tuple[int, int]]) -> Document:
        """Loss is on tokens with a part in one of the ranges. Some tokenizers leave white space out of a
        token's place: what consists of nothing else is taken to have the character before its end."""
        ids, begins, ends = self._template.tokens(text)
        targets = np.zeros(len(ids), np.uint8)
        for start, stop in ranges:
            targets[(ends > start) & (np.minimum(begins, ends - 1) < stop)] = 1
        return ids, targets


def _common_prefix(one: IntArray, other: IntArray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size


def _require_context(talk: Conversation, text: str) -> None:
    """Tools and questions that the template passes over would be answered out of nowhere."""
    names = [str(tool.get("function", tool).get("name")) for tool in talk.tools or ()]
    missing = [f"the tool {name}" for name in names if name not in text]
    asked = [number for number, message in enumerate(talk.messages) if message["role"] == "user"]
    missing += [f"message {number}" for number in asked if _left_out(talk.messages[number], text)]
    if missing:
        raise ConfigError(
            f"{talk.where}: the chat template does not write {missing[0]}; name one that does "
            "(data.chat_template), or fix the record"
        )


def _left_out(message: Message, text: str) -> str:
    """What the template passed over, since it does not know the field."""
    calls = [call.get("function", call).get("name") for call in message.get("tool_calls", ())]
    reasoning = [message[name] for name in ("reasoning_content", "thinking") if name in message]
    # What is before the marker may be written apart, or left out.
    answer = message["content"].rpartition("</think>")[2]
    parts = {"content": [answer], "tool_calls": calls, "reasoning": reasoning}
    missing = [
        name for name, values in parts.items() if any(str(each).strip() not in text for each in values)
    ]
    return " and ".join(missing)
