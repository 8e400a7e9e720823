"""The stream in a trainer's hands: shares of a batch, evaluation, threads that end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch, DataConfig, build_data
from fsdmoe.data.evaluation import EvalRows
from fsdmoe.data.spans import NO_SOURCE, Spans
from tests.support.corpora import (
    memory_config,
    memory_store,
    memory_stores,
    open_streams,
    take_steps,
    tokens_of,
)


def test_a_step_is_cut_into_this_ranks_micro_batches():
    streams = open_streams(memory_stores([[30] * 20]), memory_config([1.0]), ranks=3, rows=12, micro=2)
    steps = [stream.next_step() for stream in streams]
    assert [len(step) for step in steps] == [2, 2, 2]
    assert {tuple(batch.tokens_BS.shape) for step in steps for batch in step} == {(2, 8)}


def test_micro_batch_size_does_not_change_the_rows():
    stores = memory_stores([[30] * 20])
    plain, cut = (take_steps(open_streams(stores, memory_config([1.0]), ranks=2, micro=m), 3) for m in (1, 3))
    assert plain == cut


@pytest.mark.parametrize(
    ("ranks", "rows", "micro", "message"),
    [
        (3, 8, 1, "8 sequences .* over 3 data-parallel ranks .* of 1; choose a multiple of 3, such as 9$"),
        (2, 12, 4, "choose a multiple of 8, such as 16, or a divisor of 6 for train.micro_batch_size$"),
        (16, 16, 8, "in micro-batches of 8; choose 128, or 1 for train.micro_batch_size$"),
        (1, 0, 1, "expected 1 or more, got 0"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(ranks, rows, micro, message):
    with pytest.raises(ConfigError, match=rf"train\.global_batch_size: .*{message}"):
        open_streams(memory_stores([[30]]), memory_config([1.0]), ranks=ranks, rows=rows, micro=micro)


def test_iterating_gives_steps_without_end():
    (stream,) = open_streams(memory_stores([[5]]), memory_config([1.0]), ranks=1)
    steps = [step for step, _ in zip(stream, range(50), strict=False)]
    assert len(steps) == 50
    assert stream.state_dict()["steps"] >= 50


HASHES = [i * 2**60 for i in range(16)]


def eval_rows(streams, num_batches):
    batches = [list(stream.eval_batches(num_batches)) for stream in streams]
    assert len({len(one) for one in batches}) == 1, "every rank makes equally many evaluation steps"
    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_reads_the_same_held_out_rows_on_any_number_of_ranks_at_any_time(ranks):
    stores = [memory_store("a", [50] * 16, hashes=HASHES)]
    config = memory_config([1.0], holdout=0.3)
    (single,) = open_streams(stores, config, ranks=1)
    expected = torch.cat([batch.tokens_BS for batch in single.eval_batches(9)])
    streams = open_streams(stores, config, ranks=ranks)
    take_steps(streams, 2)
    first, again = (eval_rows(streams, 9) for _ in range(2))
    per_batch = [
        torch.cat(
            [batch.tokens_BS for rank in first for batch in rank[b * 12 // ranks : (b + 1) * 12 // ranks]]
        )
        for b in range(3)
    ]
    assert torch.cat(per_batch).equal(expected)
    assert all(
        a.tokens_BS.equal(b.tokens_BS)
        for x, y in zip(first, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def loss_tokens(batch: Batch) -> int:
    return int(batch.loss_mask_BS.sum())


def test_evaluation_reads_each_held_out_token_once_and_pads_without_loss():
    store = memory_store("a", [50] * 16, hashes=HASHES)
    (stream,) = open_streams([store], memory_config([1.0], holdout=0.3), ranks=1)
    batches = list(stream.eval_batches(100))
    # Hashes below 0.3 * 2**64 are those of documents 0 to 4: 250 tokens in rows of 8, 12 rows a batch.
    assert len(batches) == 36
    assert sum(loss_tokens(batch) for batch in batches) == 5 * 49
    tokens = [token for batch in batches for row in batch.tokens_BS.tolist() for token in row]
    assert sorted(tokens[:250]) == list(range(250))
    assert tokens[250:] == [0] * (36 * 8 - 250)
    whole = [batch for batch in batches if batch.document_ids_BS.max() == 0 and loss_tokens(batch) == 8]
    assert len(whole) == 5 * 6, "rows inside a document have their full context"
    assert len(list(stream.eval_batches(1))) == 12


def test_the_held_out_slice_is_not_trained_on_and_does_not_depend_on_the_seed():
    store = memory_store("a", [50] * 16, hashes=HASHES)
    config = memory_config([1.0], holdout=0.3)
    for seed in (1, 2):
        streams = open_streams([store], config, ranks=1, seed=seed)
        assert min(tokens_of(take_steps(streams, 20))) >= 250


def test_a_small_corpus_holds_out_at_least_one_document():
    (stream,) = open_streams(memory_stores([[20] * 3]), memory_config([1.0], holdout=0.001), ranks=1)
    assert sum(loss_tokens(batch) for batch in stream.eval_batches(9)) == 19


def test_copies_of_a_held_out_document_are_held_out_with_it(tmp_path):
    texts = [f"document {i}" for i in range(200)] * 2
    (tmp_path / "a.txt").write_text("|".join(texts))
    config = DataConfig(
        kind="text",
        path=str(tmp_path),
        separator="|",
        holdout=0.1,
        cache_dir=str(tmp_path / "cache"),
        seq_len=64,
    )
    stream = build_data(config, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=1, seed=0)
    held_out = stream._holdout.documents().document_N
    assert 20 <= len(held_out) <= 80
    assert sorted(held_out % 200) == sorted([*set(held_out % 200)] * 2)


def test_evaluation_without_a_held_out_slice_is_refused():
    (stream,) = open_streams(memory_stores([[20] * 3]), memory_config([1.0]), ranks=1)
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        next(stream.eval_batches(1))


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_other_libraries():
    """What other tests' libraries left running is not ours to end."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def background_threads():
    return [t for t in threading.enumerate() if t not in BEFORE]


def wait_for_quiet(seconds: float = 60.0) -> list[threading.Thread]:
    limit = time.monotonic() + seconds
    while background_threads() and time.monotonic() < limit:
        time.sleep(0.02)
    return background_threads()


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 3), (2, 0), (2, 3)])
def test_closing_ends_every_thread(num_workers, prefetch):
    config = memory_config([1.0], num_workers=num_workers, prefetch=prefetch)
    (stream,) = open_streams(memory_stores([[30] * 20]), config, ranks=1)
    stream.next_step()
    assert background_threads()
    stream.close()
    assert not wait_for_quiet()
    stream.close()
    with pytest.raises(AssertionError, match="closed"):
        stream.next_step()


def test_a_forgotten_stream_ends_its_threads():
    (stream,) = open_streams(
        memory_stores([[30] * 20]), memory_config([1.0], num_workers=2, prefetch=3), ranks=1
    )
    stream.next_step()
    del stream
    gc.collect()
    assert not wait_for_quiet()


def test_loading_a_position_ends_the_threads_of_the_old_one():
    (stream,) = open_streams(memory_stores([[30] * 20]), memory_config([1.0], prefetch=3), ranks=1)
    state = stream.state_dict()
    with stream:
        first = take_steps([stream], 2)
        stream.load_state_dict(state)
        assert take_steps([stream], 2) == first
        assert len(background_threads()) == 1


class UnreadableTokens:
    def __getitem__(self, part: slice) -> NoReturn:
        raise OSError("tokens.bin has become shorter")


def test_an_error_in_the_background_reaches_the_trainer_and_ends_the_threads(tmp_path):
    store = memory_store("a", [30] * 20)
    cut_short = type(store)(**{**store.__dict__, "shards": (UnreadableTokens(),)})
    (stream,) = open_streams([cut_short], memory_config([1.0], num_workers=2, prefetch=2), ranks=1)
    with stream, pytest.raises(OSError, match="has become shorter"):
        take_steps([stream], 50)
    assert not wait_for_quiet()


@pytest.mark.full
def test_a_program_that_forgets_to_close_still_ends():
    code = """
from tests.support.corpora import *
streams = open_streams(memory_stores([[30] * 20]), memory_config([1.0], num_workers=2, prefetch=4), ranks=2)
take_steps(streams, 3)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")


def test_ranks_that_read_different_data_can_tell_by_the_fingerprint():
    config = memory_config([1.0])
    (a,), (b,) = (open_streams(memory_stores([[30] * n]), config, ranks=1) for n in (20, 21))
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == open_streams(memory_stores([[30] * 20]), config, ranks=2)[1].fingerprint


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    seq_len=st.integers(2, 16),
    at_once=st.integers(1, 7),
    whole=st.booleans(),
)
def test_evaluation_rows_cover_every_held_out_token_once(lengths, seq_len, at_once, whole):
    (store,) = memory_stores([lengths])
    zeros = np.zeros(len(lengths), dtype=np.int64)
    documents = Spans(zeros, np.arange(len(lengths)), zeros, np.array(lengths))
    rows = EvalRows(documents, seq_len, keeps_whole=(whole,))
    parts = [rows.read(first, first + at_once) for first in range(0, rows.num_rows + 3, at_once)]
    pieces = [piece for part in parts for piece in part if piece[0] != NO_SOURCE]
    if whole:
        assert all(start % seq_len == 0 for _, _, start, _ in pieces), "cut at the end of a full row only"
    tokens = [int(store.offsets[d]) + t for _, d, start, stop in pieces for t in range(start, stop)]
    assert sorted(tokens) == list(range(sum(lengths)))
    assert all(part.num_tokens == at_once * seq_len for part in parts[: (rows.num_rows - 1) // at_once])


def test_without_packing_an_evaluation_row_has_one_document_and_none_is_left_out():
    store = memory_store("a", [5, 30, 9, 8] * 4, hashes=HASHES)
    tokens = []
    for pack in (True, False):
        (stream,) = open_streams([store], memory_config([1.0], holdout=0.3, pack=pack), ranks=1)
        batches = list(stream.eval_batches(9))
        tokens.append(sorted(t for batch in batches for t in batch.tokens_BS[batch.loss_mask_BS].tolist()))
        if not pack:
            assert not any(batch.loss_mask_BS[batch.document_ids_BS > 0].any() for batch in batches)
    assert tokens[0] == tokens[1] != []


def test_a_short_evaluation_is_spread_over_the_documents():
    store = memory_store("a", [400] * 16, hashes=HASHES)
    (stream,) = open_streams([store], memory_config([1.0], holdout=0.3), ranks=1)
    tokens = torch.cat([batch.tokens_BS for batch in stream.eval_batches(1)])
    assert len((tokens // 400).unique()) >= 4
