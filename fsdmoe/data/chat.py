"""Chat records for fine-tuning: turns to tokens, and which of these tokens carry loss.

With the default template a conversation becomes (loss on what is underlined, for the roles that carry loss):

    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nGood day<|im_end|>\\n<|endoftext|>
                                                            ~~~~~~~~~~~~~~~~~~

The closing marker is learnt with the answer, so that the model stops; the line break behind it, which the
template writes whatever the model says, and the final end of text are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdmoe.data.token_types import TokenArray
from fsdmoe.data.tokenizer import Tokenizer
from fsdmoe.errors import ConfigError

# Roles are written into the template, where a marker would be special: a record must not insert one.
_ROLE = re.compile(r"[\w-]+")


class Turn(NamedTuple):
    """One message."""

    role: str
    content: str


Conversation = tuple[Turn, ...]


def parse_conversation(key: str, where: str, value: Any) -> Conversation:
    """A list of `{"role": ..., "content": ...}`; the content is text, or a list of text parts."""
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{key}.field: {where}: expected a list of messages, got {value!r:.40}; fix or remove the record"
        )
    turns = []
    for number, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        content = _content(message.get("content")) if isinstance(message, dict) else None
        if not isinstance(role, str) or not _ROLE.fullmatch(role) or content is None:
            raise ConfigError(
                f"{key}.path: {where}: message {number} needs a `role` (one word) and a text `content`, "
                f"got {message!r:.80}; fix or remove the record"
            )
        turns.append(Turn(role, content))
    return tuple(turns)


def _content(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) else None for part in value]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


class ChatEncoder:
    """Writes conversations in a template."""

    def __init__(self, tokenizer: Tokenizer, template: str, loss_roles: Sequence[str]) -> None:
        missing = tokenizer.missing_markers(template)
        if missing:
            raise ConfigError(
                f"data.chat_format: the tokenizer has no token {', '.join(missing)}; use the markers of "
                "its own chat format"
            )
        self._tokenizer = tokenizer
        self._loss_roles = frozenset(loss_roles)
        self._before, _, after = template.partition("{content}")
        closing = after.rstrip()
        self._closing = tokenizer.encode_template(closing)
        self._gap = tokenizer.encode_template(after[len(closing) :])

    def encode(self, conversation: Conversation) -> tuple[TokenArray, npt.NDArray[np.uint8]]:
        """Token ids, and for each whether it carries loss. No bos, no eos."""
        pieces: list[TokenArray] = []
        targets: list[npt.NDArray[np.uint8]] = []
        contents = self._tokenizer.encode_batch([turn.content for turn in conversation])
        for turn, content in zip(conversation, contents, strict=True):
            opening = self._tokenizer.encode_template(self._before.replace("{role}", turn.role))
            learnt = not self._loss_roles or turn.role in self._loss_roles
            pieces += [opening, content, self._closing, self._gap]
            flags = (0, learnt, learnt, 0)
            targets += [np.full(len(p), flag, np.uint8) for p, flag in zip(pieces[-4:], flags, strict=True)]
        return np.concatenate(pieces), np.concatenate(targets)
