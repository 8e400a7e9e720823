"""Text to token ids. The byte tokenizer needs nothing; `hf_tokenizer.py` reads any other.

Text and templates are kept apart: what a document says is always ordinary text, even where it spells out a
special token, and only a chat template (`chat_template.py`) can write one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.token_types import TokenArray


class Tokenizer(Protocol):
    """What the data package needs of a tokenizer."""

    fingerprint: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    """Of the token that a run puts before each document."""
    own_bos: str
    """The token that the tokenizer itself would put before a text; empty where it puts none."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Token ids of each text; special tokens in it are ordinary text. No bos, no eos."""

    def encode_answer(self, prompt: str, answer: str) -> tuple[TokenArray, int]:
        """Token ids of both as one text, and the place of the first with a part in the answer."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of text as a model sees it: special tokens in it are special."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Token ids back to text, as far as that is possible."""


BYTE_SPECIALS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<|pad|>": 259}


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and eight special tokens behind them."""

    fingerprint = "bytes-1"
    # Four ids are in reserve: a multiple of 8 can be split over tensor-parallel ranks.
    vocab_size = 264
    eos_id = BYTE_SPECIALS["<|endoftext|>"]
    bos_id: int | None = None
    own_bos = ""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def encode_answer(self, prompt: str, answer: str) -> tuple[TokenArray, int]:
        (tokens,) = self.encode_batch([prompt + answer])
        return tokens, len(prompt.encode())

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, BYTE_SPECIALS))})", text):
            ids += [BYTE_SPECIALS[piece]] if piece in BYTE_SPECIALS else piece.encode()
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        names = {number: name for name, number in BYTE_SPECIALS.items()}
        pieces = [bytes([t]) if t < 256 else names.get(int(t), f"<|{int(t)}|>").encode() for t in tokens]
        return b"".join(pieces).decode(errors="replace")


def tokenizer_file(name: str) -> Path:
    """Where the tokenizer of a path should be: itself, or in the folder that it is."""
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def tokenizer_path(name: str) -> Path | None:
    """The file that `data.tokenizer` names; None for the byte tokenizer."""
    if name == "bytes":
        return None
    path = tokenizer_file(name)
    if not path.is_file():
        raise ConfigError(
            f'data.tokenizer: expected "bytes" or the path of a tokenizer.json, got {name!r}, and there is '
            f"no file {path}; download the tokenizer of your model (hf download MODEL tokenizer.json "
            "--local-dir FOLDER) and give its path"
        )
    return path


def load_tokenizer(name: str, *, eos_token: str = "", bos_token: str = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    path = tokenizer_path(name)
    if path is None:
        return ByteTokenizer()
    from fsdmoe.data.hf_tokenizer import JsonTokenizer  # an optional dependency: imported only when chosen

    return JsonTokenizer(path, eos_token=eos_token, bos_token=bos_token)
