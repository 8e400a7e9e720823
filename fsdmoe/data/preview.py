"""Rows as text that shows what a model learns from: documents, and in them the tokens that carry loss.

    row 1: 64 tokens, 3 documents, 21 with loss (32.8 %)
      chats/4, tokens 0 to 38: 18 with loss (46.2 %)
        <|im_start|>user⏎
        Hello<|im_end|>⏎
        <|im_start|>assistant⏎
        ⟦Good day<|im_end|>⟧⏎

A token is marked where it is to be predicted: its loss is computed at the token before it, which has it as a
label. The first token of a document is never predicted, that of a document which a row cut belongs to the row
before, and what a row's last token predicts stands behind an arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
from rich.text import Text

from fsdmoe.data.batch import Batch
from fsdmoe.data.origin import NO_DOCUMENT
from fsdmoe.data.tokenizer import Tokenizer

OPENING = "⟦"
CLOSING = "⟧"
LEGEND = (
    f"Tokens in {OPENING} {CLOSING} carry loss; ⏎ is a line break; → is before the first token of the next "
    "row, where a document goes on there; a document is named by source and number."
)
PADDING = "padding"
_CONTEXT = 8
"""Tokens decoded before a piece: some decoders drop a space at the beginning of what they are given."""


class RowSegment(NamedTuple):
    """The tokens of one document in a row, [start, stop), and what is known of them."""

    name: str
    start: int
    stop: int
    offset: int
    """Place of the first of them in the document."""
    num_loss: int


def row_text(batch: Batch, row: int, tokenizer: Tokenizer | None, *, title: str, most: int) -> Text:
    """A row with its documents, each with its text.

    Args:
        batch: Rows as `next_step` hands them out.
        row: Which of them.
        tokenizer: What turns ids into text; None shows the ids.
        title: What to call the row.
        most: Characters of a piece, marked or not, that are shown; the middle of a longer one is left out.

    Returns:
        The lines. Loss is marked in the text itself, and coloured where the terminal has colours.
    """
    segments = list(_segments(batch, row))
    size, num_loss = batch.tokens_BS.shape[1], sum(segment.num_loss for segment in segments)
    num_documents = sum(segment.name != PADDING for segment in segments)
    documents = f"{num_documents} document" + ("s" if num_documents > 1 else "")
    text = Text()
    text.append(f"{title}: {size:,} tokens, {documents}, {_with_loss(num_loss, size)}", "bold")
    for segment in segments:
        length = segment.stop - segment.start
        if segment.name == PADDING:
            text.append(f"\n  padding: {length:,} tokens", "cyan")
            continue
        last = segment.offset + length - 1
        place = f"tokens {segment.offset:,} to {last:,}: {_with_loss(segment.num_loss, length)}"
        text.append(f"\n  {_plain(segment.name)}, {place}\n    ", "cyan")
        for piece, has_loss in _pieces(batch, row, segment, tokenizer):
            shown = _shortened(piece, most).replace("\n", "\n    ")
            if has_loss:
                shown = f"{OPENING}{shown}{CLOSING}"
            text.append(shown, "green" if has_loss else "dim")
        text.remove_suffix("\n    ")  # of a document that ends with a line break
    return text


def loss_share(batches: Sequence[Batch]) -> str:
    """How many tokens there are, and how many of them carry loss."""
    size = sum(batch.num_tokens for batch in batches)
    return f"{size:,} tokens, {_with_loss(sum(int(batch.loss_mask_BS.sum()) for batch in batches), size)}"


def _with_loss(count: int, size: int) -> str:
    return f"{count:,} with loss ({100 * count / size:.1f} %)"


def _segments(batch: Batch, row: int) -> Iterator[RowSegment]:
    ids = batch.document_ids_BS[row].numpy()
    mask = batch.loss_mask_BS[row].numpy()
    bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        name = f"document {number}"
        offset = 0
        if batch.origin is not None:
            document = int(batch.origin.document[row, start])
            name = PADDING if document == NO_DOCUMENT else batch.origin.names[document]
            offset = int(batch.origin.offset[row, start])
        yield RowSegment(name, start, stop, offset, int(mask[start:stop].sum()))


def _pieces(
    batch: Batch, row: int, segment: RowSegment, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, bool]]:
    """The text of a segment in pieces of tokens that all carry loss, or all do not."""
    tokens = batch.tokens_BS[row, segment.start : segment.stop].tolist()
    mask = batch.loss_mask_BS[row, segment.start : segment.stop].tolist()
    is_target = [False, *mask[:-1]]
    changes = [i for i in range(1, len(tokens)) if is_target[i] != is_target[i - 1]]
    for start, stop in pairwise([0, *changes, len(tokens)]):
        yield _decoded(tokenizer, tokens, start, stop), is_target[start]
    if mask[-1]:  # the document goes on in another row
        tokens.append(int(batch.labels_BS[row, segment.stop - 1]))
        yield "→", False
        yield _decoded(tokenizer, tokens, len(tokens) - 1, len(tokens)), True


def _decoded(tokenizer: Tokenizer | None, tokens: Sequence[int], start: int, stop: int) -> str:
    if tokenizer is None:
        return " " * (start > 0) + " ".join(map(str, tokens[start:stop]))
    context = tokens[max(0, start - _CONTEXT) : start]
    before = tokenizer.decode(context) if context else ""
    whole = tokenizer.decode([*context, *tokens[start:stop]])
    # A character whose bytes are in two pieces is shown with the second.
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)))
    return _plain(whole[shared:])


def _plain(text: str) -> str:
    """Nothing that a terminal would obey: text of a corpus may hold anything."""
    return "".join(
        "⏎\n" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text.encode(errors="replace").decode()
    )


def _shortened(text: str, most: int) -> str:
    if most <= 0 or len(text) <= most:
        return text
    head = most - most // 3
    tail = most // 3
    left_out = f" […{len(text) - head - tail:,} characters…] "
    return text[:head] + left_out + (text[-tail:] if tail else "")
