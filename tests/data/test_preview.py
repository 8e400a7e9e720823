"""Rows as text: what is marked is what is predicted."""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console

from fsdmoe.data.batch import Batch
from fsdmoe.data.preview import CLOSING, OPENING, loss_share, row_text
from fsdmoe.data.tokenizer import ByteTokenizer


def a_batch() -> Batch:
    """The row of `fsdmoe.data.batch`, with bytes: `$` ends a document, and `x` opens the next row."""
    tokens = torch.tensor([list(b"hi$a$new")])
    labels = torch.tensor([list(b"i$\0$\0ewx")])
    mask = torch.tensor([[True, True, False, True, False, True, True, True]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    return Batch(tokens, labels, torch.zeros_like(tokens), ids, mask)


def shown(batch: Batch, most: int = 0, tokenizer: ByteTokenizer | None = None) -> list[str]:
    return row_text(batch, 0, tokenizer or ByteTokenizer(), title="row 1", most=most).plain.splitlines()


def test_what_is_predicted_is_marked_and_documents_are_apart() -> None:
    assert shown(a_batch()) == [
        "row 1: 8 tokens, 3 documents, 6 with loss (75.0 %)",
        "  document 0, tokens 0 to 2: 2 with loss (66.7 %)",
        "    h⟦i$⟧",
        "  document 1, tokens 0 to 1: 1 with loss (50.0 %)",
        "    a⟦$⟧",
        "  document 2, tokens 0 to 2: 3 with loss (100.0 %)",
        "    n⟦ew⟧→⟦x⟧",
    ]
    assert loss_share([a_batch(), a_batch()]) == "16 tokens, 12 with loss (75.0 %)"


def test_ids_stand_for_a_tokenizer_that_is_not_at_hand() -> None:
    text = row_text(a_batch(), 0, None, title="row 1", most=0).plain
    assert "    104⟦ 105 36⟧" in text


def test_the_middle_of_a_long_piece_is_left_out_and_its_marks_stay() -> None:
    tokens = torch.from_numpy(np.frombuffer(b"a" + b"b" * 500, np.uint8).astype(np.int64))[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, -1] = False
    zeros = torch.zeros_like(tokens)
    line = shown(Batch(tokens, zeros, zeros, zeros, mask), most=30)[-1]
    assert line == f"    a{OPENING}{'b' * 20} […470 characters…] {'b' * 10}{CLOSING}"


def test_a_character_in_two_pieces_is_whole_in_one_of_them() -> None:
    tokens = torch.tensor([list("é!".encode())])
    mask = torch.tensor([[True, True, False]])
    zeros = torch.zeros_like(tokens)
    assert "é!" in shown(Batch(tokens, zeros, zeros, zeros, mask))[-1]


def test_colours_come_on_a_terminal_only() -> None:
    text = row_text(a_batch(), 0, ByteTokenizer(), title="row 1", most=0)
    for is_terminal in (True, False):
        console = Console(force_terminal=is_terminal, color_system="standard" if is_terminal else None)
        with console.capture() as captured:
            console.print(text, soft_wrap=True)
        assert ("\x1b[32m" in captured.get()) == is_terminal
