"""A tokenizer's own chat template, written by transformers. The only file of the package that imports it."""

from __future__ import annotations

import functools
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.chat_records import Conversation, Message
from fsdmoe.data.tokenizer import BYTE_SPECIALS, Tokenizer, tokenizer_path

try:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template
except ImportError as error:
    raise ImportError(
        "data.kind: chats are written by a template through `transformers`; pip install 'fsdmoe[hf]'"
    ) from error

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = re.compile(r"<[|｜][^<>{}\s'\"]+[|｜]>")
IntArray = npt.NDArray[np.int64]


class Rendered(NamedTuple):
    """A conversation as the template writes it."""

    text: str
    generated: tuple[tuple[int, int], ...]
    """The ranges of it between the template's generation markers."""


class Tokens(NamedTuple):
    """A text in tokens, each with its place there."""

    ids: IntArray
    begins: IntArray
    ends: IntArray


class ChatTemplate:
    """A template and the tokenizer that reads what it writes.

    Args:
        tokenizer: What `data.tokenizer` names.
        template: What `data.chat_template` names: a Jinja file, `chatml`, or nothing for the tokenizer's own.
        names: Special tokens by the template's name of them (`bos_token`), instead of the tokenizer's.
    """

    def __init__(self, tokenizer: str, template: str, names: dict[str, str]) -> None:
        self._tokenizer = _load(tokenizer_path(tokenizer))
        if template or tokenizer == "bytes":
            self._tokenizer.chat_template = _read(template or "chatml")
            self._require_markers(template)
        self._names: dict[str, Any] = {**self._tokenizer.special_tokens_map, **names}
        specials = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = "|".join(map(re.escape, longest_first)) or "(?!)"

    def check(self, tokenizer: Tokenizer, *, is_needed: bool) -> None:
        """Refuse what would fail with the first record, or write ids that the run does not know of."""
        if is_needed and not self._tokenizer.chat_template:
            raise ConfigError(
                "data.chat_template: the tokenizer has no chat template of its own; name a Jinja file, or "
                '"chatml"'
            )
        num_ids = max(self._tokenizer.get_vocab().values()) + 1
        if num_ids > tokenizer.vocab_size:
            raise ConfigError(
                f"data.tokenizer: its tokenizer_config.json adds tokens up to {num_ids - 1}, tokenizer.json "
                f"ends with {tokenizer.vocab_size - 1}; save both again with save_pretrained"
            )

    @property
    def facts(self) -> list[Any]:
        """What decides how a conversation is written, next to the tokenizer."""
        return [self._tokenizer.chat_template, {name: str(token) for name, token in self._names.items()}]

    def has_markers(self, talk: Conversation) -> bool:
        """Whether the template says itself what an assistant generates."""
        return bool(_GENERATION.search(self._template_of(talk)))

    def knows_role(self, talk: Conversation, role: str) -> bool:
        """Whether the template names this role."""
        return any(f"{quote}{role}{quote}" in self._template_of(talk) for quote in "'\"")

    def spelled(self, text: str) -> str | None:
        """A special token that this text spells out."""
        found = re.search(self._special, text)
        return found and found.group()

    def is_closed(self, text: str) -> bool:
        """Whether the text ends with a special token."""
        return re.search(f"({self._special})\\Z", text) is not None

    def after_special(self, text: str, place: int) -> int:
        """The end of the special token that begins at this place, or the place."""
        found = re.compile(self._special).match(text, place)
        return found.end() if found else place

    def tokens(self, text: str) -> Tokens:
        """What the template wrote, in which special tokens are special."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.fromiter(chain.from_iterable(encoded["offset_mapping"]), np.int64)
        return Tokens(np.array(encoded["input_ids"], np.int64), places[::2], places[1::2])

    def render(self, talk: Conversation, stop: int | None = None, *, prompt: bool = False) -> Rendered:
        """The first `stop` messages; with `prompt`, and what opens an answer to them."""
        render: Any = render_jinja_template  # annotated as returning a text
        try:
            (text,), ranges = render(
                conversations=[list(talk.messages[:stop])], tools=talk.tools,
                chat_template=self._template_of(talk), add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.has_markers(talk),
                **{**self._names, **(talk.variables or {})},
            )  # fmt: skip
        except Exception as error:  # a template is foreign code: its own refusals, and any mistake in it
            raise ConfigError(
                f"{talk.where}: the chat template cannot write it ({error}); fix or remove the record"
            ) from error
        return Rendered(text, tuple(ranges[0]) if ranges else ())

    def _template_of(self, talk: Conversation) -> str:
        """A tokenizer may have one more template, for conversations with tools."""
        return str(self._tokenizer.get_chat_template(tools=talk.tools))

    def with_arguments(self, talk: Conversation) -> Conversation:
        """The same with the arguments of tool calls as the template takes them: objects, or JSON text."""
        if self._takes_objects is None or not any("tool_calls" in message for message in talk.messages):
            return talk
        messages = json.loads(json.dumps(talk.messages))
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            function = call.get("function", call)
            arguments = function.get("arguments")
            if self._takes_objects and isinstance(arguments, str):
                function["arguments"] = _parsed(talk.where, arguments)
            elif not self._takes_objects and isinstance(arguments, dict):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return talk._replace(messages=tuple(messages))

    @functools.cached_property
    def _takes_objects(self) -> bool | None:
        """Asked of the template itself, since some add text to arguments and others walk over them. None
        where it takes neither."""
        for arguments in ({"key": "value"}, '{"key": "value"}'):
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            asked: list[Message] = [{"role": "user", "content": "?"}]
            asked.append({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                self.render(Conversation("", tuple(asked)))
            except ConfigError:
                continue
            return isinstance(arguments, dict)
        return None

    def _require_markers(self, template: str) -> None:
        known = self._tokenizer.get_vocab()
        missing = sorted(set(_MARKER.findall(self._tokenizer.chat_template)) - known.keys())
        if missing:
            raise ConfigError(
                f"data.chat_template: {template} writes {', '.join(missing)}, which the tokenizer has no "
                "tokens for; name a template that was made for it"
            )


def _load(path: Path | None) -> PreTrainedTokenizerFast:
    if path is None:
        # The ids of the byte tokenizer: a vocabulary of bytes that every character falls back to.
        backend = Backend(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
        backend.add_special_tokens(list(BYTE_SPECIALS))
        return PreTrainedTokenizerFast(tokenizer_object=backend)
    if path.name != "tokenizer.json":
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    try:
        return PreTrainedTokenizerFast.from_pretrained(path.parent, local_files_only=True)
    except Exception as error:  # whatever reading its files raises
        raise ConfigError(
            f"data.tokenizer: transformers cannot read the tokenizer in {path.parent} ({error}); download "
            "it again"
        ) from error


def _read(template: str) -> str:
    if template == "chatml":
        return CHATML
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'data.chat_template: expected "chatml" or the path of a Jinja file, got {template!r} ({error}); '
            "check the path"
        ) from error


def _parsed(where: str, arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError as error:
        raise ConfigError(
            f"{where}: the arguments of a tool call are no JSON, got {arguments!r:.60}; fix or remove the "
            "record"
        ) from error
