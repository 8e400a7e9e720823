"""Any `tokenizer.json`, read by the `tokenizers` library. The only file that imports it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.files import is_lfs_pointer
from fsdmoe.data.token_types import TokenArray

try:
    from tokenizers import Tokenizer as _Backend
except ImportError as error:
    raise ImportError(
        "data.tokenizer: reading a tokenizer.json needs the `tokenizers` library; pip install 'fsdmoe[data]'"
    ) from error

_EOS_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
)


class JsonTokenizer:
    """A tokenizer of the Hugging Face kind."""

    def __init__(self, path: Path, *, eos_token: str = "", bos_token: str = "") -> None:
        self._path = path
        content = _read(path)
        self._text = _load(path, content)
        self._text.encode_special_tokens = True
        vocab = self._text.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(f"data.tokenizer: {path} has no tokens; download it again")
        self.vocab_size = max(vocab.values()) + 1
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.eos_id = self._special(eos_token) if eos_token else self._usual_eos(vocab)
        self.bos_id = self._special(bos_token, key="bos_token") if bos_token else None
        self.own_bos = self._own_bos()
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self._dtype) for one in encoded]

    def encode_answer(self, prompt: str, answer: str) -> tuple[TokenArray, int]:
        encoded = self._text.encode(prompt + answer, add_special_tokens=False)
        ends = [end for _, end in encoded.offsets]
        first = next((at for at, end in enumerate(ends) if end > len(prompt)), len(ends))
        return np.array(encoded.ids, dtype=self._dtype), first

    def encode_prompt(self, text: str) -> list[int]:
        self._text.encode_special_tokens = False
        ids = self._text.encode(text, add_special_tokens=False).ids
        self._text.encode_special_tokens = True
        return list(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._text.decode([int(t) for t in tokens], skip_special_tokens=False))

    def _special(self, token: str, key: str = "eos_token") -> int:
        number = self._text.token_to_id(token)
        if number is None:
            raise ConfigError(f"data.{key}: {token!r} is no token of {self._path}; {self._choices()}")
        return int(number)

    def _usual_eos(self, vocab: dict[str, int]) -> int:
        """The one that the folder states, or one under a usual name."""
        for name in (_stated(self._path.with_name("tokenizer_config.json"), "eos_token"), *_EOS_NAMES):
            if name in vocab:
                return vocab[name]
        raise ConfigError(
            f"data.eos_token: {self._path} has no end-of-text token under a usual name "
            f"({', '.join(_EOS_NAMES)}); name the one to use; {self._choices()}"
        )

    def _own_bos(self) -> str:
        encoded = self._text.encode("a", add_special_tokens=True)
        is_special = bool(encoded.special_tokens_mask) and encoded.special_tokens_mask[0] == 1
        return str(encoded.tokens[0]) if is_special else ""

    def _choices(self) -> str:
        added = [token.content for token in self._text.get_added_tokens_decoder().values() if token.special]
        return f"its special tokens are {', '.join(added[:12])}" if added else "it has no special tokens"


def _stated(path: Path, key: str) -> str:
    """A special token of ``tokenizer_config.json``, as text or as a table with its ``content``; empty without
    one."""
    try:
        value = json.loads(path.read_bytes()).get(key)
    except (OSError, ValueError, AttributeError):
        return ""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: cannot read {path} ({error.strerror}); check its permissions"
        ) from error


def _load(path: Path, content: bytes) -> _Backend:
    try:
        backend = _Backend.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        if is_lfs_pointer(path):
            raise ConfigError(
                f"data.tokenizer: {path} is a pointer of git-lfs, not the tokenizer; run `git lfs pull` in "
                f"{path.parent}, or download it again"
            ) from error
        raise ConfigError(
            f"data.tokenizer: {path} is not a readable tokenizer.json ({error}); download that file "
            "of your model again"
        ) from error
    # A file may have truncation or padding switched on, which would lose or invent tokens.
    backend.no_truncation()
    backend.no_padding()
    return backend
