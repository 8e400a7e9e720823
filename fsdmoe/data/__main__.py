"""Look at a data set and at how fast it is read: `python -m fsdmoe.data --config run.toml`.

Reads the `[data]` section of a TOML file (without one: the quick-start corpus), prints what the sources hold,
the beginning of the first row, and how many tokens a second one rank reads, with everything but the model.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from fsdmoe.data.config import DataConfig, SourceConfig
from fsdmoe.data.stream import DataStream, build_data
from fsdmoe.data.tokenizer import load_tokenizer
from fsdmoe.errors import ConfigError


def main() -> None:
    """Parse, open, show, measure."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdmoe.data", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", type=Path, help="a TOML file with a [data] section")
    parser.add_argument("--steps", type=int, default=200, help="steps to measure")
    parser.add_argument(
        "--global-batch-size", type=int, default=32, help="rows of a step, all ranks together"
    )
    parser.add_argument(
        "--dp-size", type=int, default=1, help="measure as one of this many data-parallel ranks"
    )
    arguments = parser.parse_args()
    try:
        config = _read(arguments.config)
        rows, ranks = arguments.global_batch_size, arguments.dp_size
        began = time.perf_counter()
        shape = {"dp_rank": 0, "dp_size": ranks, "micro_batch_size": 1, "global_batch_size": rows}
        with build_data(config, **shape, seed=0) as stream:
            print(f"opened in {time.perf_counter() - began:.2f} s, vocabulary {stream.vocab_size}")
            _show(stream, config)
            _measure(stream, arguments.steps, rows // ranks * config.seq_len)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _read(path: Path | None) -> DataConfig:
    if path is None:
        return DataConfig()
    try:
        section: dict[str, Any] = tomllib.loads(path.read_text()).get("data", {})
        sources = tuple(SourceConfig(**source) for source in section.pop("sources", []))
        return DataConfig(**section, sources=sources)
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ConfigError(f"data: cannot use {path} ({error}); fix the file") from error


def _show(stream: DataStream, config: DataConfig) -> None:
    for source in stream.sources():
        print(f"{source.name}: {source.documents:,} documents, {source.tokens:,} tokens")
        for reason, count in source.dropped.items():
            print(f"  left out: {count:,} {reason}")
    first = stream.next_step()[0].tokens_BS[0].tolist()
    if config.vocab_size is None:
        tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token, bos_token=config.bos_token)
        print(f"first row: {tokenizer.decode(first)[:160]!r}")


def _measure(stream: DataStream, num_steps: int, tokens_a_step: int) -> None:
    began = time.perf_counter()
    for _ in range(num_steps):
        stream.next_step()
    seconds = time.perf_counter() - began
    rate = num_steps * tokens_a_step / seconds / 1e6
    print(f"{rate:.1f} M tokens/s on this rank, {1e3 * seconds / num_steps:.2f} ms a step")


if __name__ == "__main__":
    main()
