"""Look at what a run learns from, and at how fast it is read: `python -m fsdmoe.data --config run.toml`.

Takes the configuration of a run as `train.py` does (without one: the quick-start corpus), with its tokenizer,
seed and batch. Prints what the sources hold, the first rows with the tokens that carry loss marked, and how
many tokens a second one rank reads, with everything but the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from fsdmoe.config import Config
from fsdmoe.config.build import compose
from fsdmoe.config.command_line import split_arguments, written_in
from fsdmoe.config.toml import read_toml
from fsdmoe.config.warnings import warnings_of
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import choice_like, counted, unreachable
from fsdmoe.data.batch import Batch
from fsdmoe.data.config import DataConfig, keyed_sources
from fsdmoe.data.packing import pack_rows
from fsdmoe.data.preview import LEGEND, loss_share, row_text
from fsdmoe.data.sources import open_sources
from fsdmoe.data.spans import Spans
from fsdmoe.data.store import SECOND_BEGINS
from fsdmoe.data.stream import DataStream, build_data
from fsdmoe.data.tokenizer import Tokenizer, load_tokenizer
from fsdmoe.observe.console import make_console, suppress_broken_pipe


def parser() -> argparse.ArgumentParser:
    """What the command takes, but for overrides."""
    made = argparse.ArgumentParser(
        prog="python -m fsdmoe.data", description=(__doc__ or "").splitlines()[0], allow_abbrev=False,
        epilog="--section.key VALUE overrides a field of the configuration, as with train.py",
    )  # fmt: skip
    made.add_argument("--config", metavar="FILE", help="the run's TOML file, or one with a [data] section")
    made.add_argument("--show", type=int, default=1, metavar="N", help="rows to show")
    made.add_argument(
        "--chars", type=int, default=600, help="characters shown of a piece with or without loss; 0 for all"
    )
    made.add_argument("--steps", type=int, default=200, help="steps to measure; 0 for none")
    made.add_argument(
        "--global-batch-size", type=int, help="rows of a step, all ranks together; else the run's, or 32"
    )
    made.add_argument(
        "--dp-size", type=int, default=1, help="measure as one of this many data-parallel ranks"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, open, show, measure."""
    given, others = parser().parse_known_args(arguments)
    try:
        _refuse_misspelt(others)
        config = _read(given.config, others)
        rows = given.global_batch_size or (config.train.global_batch_size if given.config else 32)
        if config.data.has_pairs:
            _show_pairs(config.data, given.show, given.chars)
            return
        shape = {"dp_rank": 0, "dp_size": given.dp_size, "micro_batch_size": 1, "global_batch_size": rows}
        began = time.perf_counter()
        with suppress_broken_pipe(), build_data(config.data, **shape, seed=config.train.seed) as stream:
            seconds = time.perf_counter() - began
            print(f"opened in {seconds:.2f} s, vocabulary {stream.vocab_size} of {config.data.tokenizer}")
            _show(stream, _tokenizer(config.data), given.show, given.chars)
            if given.steps > 0:
                _measure(stream, given.steps, rows // given.dp_size * config.data.seq_len)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        named = [] if given.config is None else ["--config", given.config]
        print(unreachable(error, written_in([*named, *others])), file=sys.stderr)
        sys.exit(2)


def _refuse_misspelt(others: Sequence[str]) -> None:
    """Options that are nearly this command's own."""
    own = [option for action in parser()._actions for option in action.option_strings]
    for word in others:
        option = word.partition("=")[0]
        if option.startswith("--") and "." not in option and (like := choice_like(option, own)):
            raise ConfigError(f"{option}: unknown option; {like}")


def _read(path: str | None, others: Sequence[str]) -> Config:
    """The sections of the run; what only its ranks and devices decide is not asked."""
    problems: list[str] = []
    flags, overrides = split_arguments(others, problems)
    problems += [f"{flag}: only train.py takes it; drop it" for flag in flags]
    mapping = {} if path is None else read_toml(path, problems)
    config, _ = compose(mapping, overrides, problems)
    refuse(problems)
    if path is not None:
        for line in warnings_of(config):
            print(f"warning: {line}", file=sys.stderr)
    return config


def _tokenizer(config: DataConfig) -> Tokenizer | None:
    """None for ids that were written with a tokenizer that is not at hand."""
    if config.vocab_size is not None and config.tokenizer == "bytes":
        return None
    return load_tokenizer(config.tokenizer, eos_token=config.eos_token, bos_token=config.bos_token)


def _show(stream: DataStream, tokenizer: Tokenizer | None, num_rows: int, most: int) -> None:
    for source in stream.sources():
        print(f"{source.name}: {counted(source.documents, 'document')}, {source.tokens:,} tokens")
        for reason, count in source.dropped.items():
            print(f"  left out: {count:,} {reason}")
        if source.cut:
            print(f"  {source.cut_text}; raise it, or shorten them")
        if source.without_loss:
            print(f"  {source.without_loss}; fix their roles, or name them in data.chat_loss_roles")
    batches: list[Batch] = stream.next_step()
    share = f"the first step on this rank: {loss_share(batches)}"
    while len(batches) < num_rows:
        batches += stream.next_step()
    console = make_console()
    for number, batch in enumerate(batches[: max(0, num_rows)], 1):
        console.print(row_text(batch, 0, tokenizer, title=f"row {number}", most=most), soft_wrap=True)
    if num_rows > 0:
        print(LEGEND)
    print(share)


def _show_pairs(config: DataConfig, num_pairs: int, most: int) -> None:
    """Chosen and rejected answers, one below the other."""
    stores, vocab_size = open_sources(config)
    tokenizer = _tokenizer(config)
    console = make_console()
    print(f"vocabulary {vocab_size} of {config.tokenizer}")
    for number, (_, source) in enumerate(keyed_sources(config)):
        store = stores[number]
        if source.kind != "preference":
            continue
        print(f"{store.name}: {store.num_documents:,} pairs, {store.num_tokens:,} tokens")
        for pair in range(min(num_pairs, store.num_documents)):
            length = int(store.lengths(np.array([pair]))[0])
            targets = store.read_targets(pair, 0, length)
            assert targets is not None
            middle = int(np.flatnonzero(targets == SECOND_BEGINS)[0])
            for name, start, stop in (("chosen", 0, middle), ("rejected", middle, length)):
                spans = Spans(*(np.array([value]) for value in (number, pair, start, stop)))
                batch = pack_rows(spans, stores, stop - start, 1)
                title = f"pair {pair + 1}, {name}"
                console.print(row_text(batch, 0, tokenizer, title=title, most=most), soft_wrap=True)
    print(LEGEND)


def _measure(stream: DataStream, num_steps: int, tokens_a_step: int) -> None:
    began = time.perf_counter()
    for _ in range(num_steps):
        stream.next_step()
    seconds = time.perf_counter() - began
    rate = num_steps * tokens_a_step / seconds / 1e6
    print(f"{rate:.1f} M tokens/s on this rank, {1e3 * seconds / num_steps:.2f} ms a step")


if __name__ == "__main__":
    main()
