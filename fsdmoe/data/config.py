"""The `[data]` section: where documents come from, how they become tokens, how rows are cut from them.

One source is written straight into the section; several, with weights, as `[[data.sources]]`:

    [data]                              [data]
    kind = "text"                       seq_len = 2048
    path = "corpus/"                    [[data.sources]]
    seq_len = 2048                      kind = "jsonl"
                                        path = "web/*.jsonl"
                                        weight = 0.7
                                        [[data.sources]]
                                        kind = "parquet"
                                        path = "code/"
                                        weight = 0.3

Only what can be judged without touching the disk is checked here; `check_data` looks for the files
and tries the tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from typing import Literal, get_args

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import at_least, one_of

SourceKind = Literal[
    "python-stdlib", "text", "jsonl", "parquet", "chat", "completion", "preference", "tokens"
]
TokenDtype = Literal["uint16", "uint32"]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """What is said of one source, in the section itself or in a mixture."""

    kind: SourceKind = "text"
    """What the files hold: plain `text`, `jsonl` or `parquet` records with a text field, records (JSONL or
    Parquet) of a `chat`, of a `completion` (with its prompt) or of a `preference` (chosen and rejected),
    pre-tokenised `tokens` (.npy or .bin), or `python-stdlib`, the sources of the running Python."""

    path: str = ""
    """A file, a directory (searched recursively) or a glob pattern."""

    dataset: str = ""
    """Instead of `path`: a dataset of the Hugging Face Hub by its name, or a folder that `datasets` reads."""

    subset: str = ""
    """Which configuration of the dataset. Empty: its only one."""

    split: str = "train"
    """Which split of the dataset."""

    glob: str = ""
    """Which files of a directory belong to it. Empty: `*.txt`, `*.jsonl`, `*.parquet`, ... by kind."""

    field: str = ""
    """Key or column that holds the text (or the messages). Empty: `text`, for chat `messages`."""

    separator: str = ""
    """Splits each text file into documents at this string. Empty: a file is a document."""

    max_bytes: int | None = None
    """Stop after the document that reaches this many bytes of text. None: read everything."""

    document_end: int | None = None
    """For `tokens` without an offsets file: the token id that ends a document. None: a file is a document."""

    dtype: TokenDtype = "uint16"
    """For `tokens` in .bin files: the little-endian integer type they were written with."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig(SourceFiles):
    """One source of a mixture."""

    weight: float = 1.0
    """This source's share of the mixture's tokens, relative to the other weights."""

    name: str = ""
    """Name in messages and in the saved position. Empty: the path or dataset, or the kind where there is
    neither."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceFiles):
    """Where the tokens come from and how they are packed."""

    kind: SourceKind = "python-stdlib"

    sources: tuple[SourceConfig, ...] = ()
    """A weighted mixture, instead of the single source that `kind` and `path` name."""

    tokenizer: str = "bytes"
    """`bytes` (256 values and 8 special tokens), or the path of a `tokenizer.json` or of its folder."""

    eos_token: str = ""
    """Token appended to every document. Empty: the tokenizer's own, found by its usual names."""

    bos_token: str = ""
    """Token put before every document. Empty: none."""

    vocab_size: int | None = None
    """Vocabulary size, for `tokens` written with a tokenizer that is not at hand. None: the tokenizer's."""

    seq_len: int = 1024
    """Tokens in a row."""

    pack: bool = True
    """Fill rows with several documents, which do not see each other; chats and completions stay whole where
    they fit a row. False: one document (or a piece of one) and padding without loss behind it, for models
    that cannot separate documents."""

    shuffle: bool = True
    """A new order of documents in each epoch, drawn from the seed. False: the order of the files."""

    piece_len: int | None = None
    """Documents longer than this many tokens are shuffled in pieces. None: 16 rows' worth."""

    cursors: int | None = dataclasses.field(default=None, metadata={"formerly": "lanes"})
    """How many documents are read side by side, so that the rows of a batch differ. None: 64, fewer for a
    small corpus, 1 without shuffling."""

    holdout: float = 0.01
    """Fraction of documents, chosen by hash, that is kept for evaluation and never trained on."""

    chat_template: str = ""
    """The Jinja template that writes chats: the path of a file, or `chatml`. Empty: the tokenizer's own (for
    `bytes`, `chatml`)."""

    chat_loss_roles: tuple[str, ...] = ("assistant",)
    """Roles whose turns carry loss: of an assistant, what it generates; of others, the whole turn. Empty:
    every turn does."""

    num_workers: int = 0
    """Threads that assemble rows. 0: the prefetching thread does it alone, which is enough for most runs."""

    prefetch: int = 2
    """Optimizer steps prepared ahead, in the background. 0: rows are assembled when they are asked for."""

    pin_memory: bool = True
    """Hand out page-locked memory where there is a CUDA device."""

    on_error: OnError = "stop"
    """What to do with a record that cannot be read (not JSON, no such field, no text; a text file that is not
    UTF-8): `stop` and name its file and line, or `skip` it. What was left out is counted and named at the
    start."""

    on_change: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint's position belongs to another data set: `stop` with a message, or
    `continue` from where each source that is still there stood (new sources begin at their start)."""

    cache_dir: str = ""
    """Where tokenised sources are kept. Empty: `fsdmoe/data` in the user's cache directory."""

    def __post_init__(self) -> None:
        problems = [*_source_choice_problems(self), *_stream_problems(self)]
        for key, source in keyed_sources(self):
            problems += _source_problems(key, source)
        refuse(problems)

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs of a chosen and a rejected answer."""
        return any(source.kind == "preference" for _, source in keyed_sources(self))


def keyed_sources(config: DataConfig) -> list[tuple[str, SourceConfig]]:
    """The sources of a section, each with the dotted key under which the user wrote it."""
    if config.sources:
        return [(f"data.sources[{i}]", source) for i, source in enumerate(config.sources)]
    single = {field.name: getattr(config, field.name) for field in fields(SourceFiles)}
    return [("data", SourceConfig(**single))]


def source_name(source: SourceConfig) -> str:
    """What messages call this source."""
    return source.name or source.path or source.dataset or source.kind


def _source_choice_problems(config: DataConfig) -> list[str]:
    also = [f"data.{name}" for name in _set_here(config, DataConfig)]
    if config.sources and also:
        return [
            f"data.sources: expected either one source or a mixture, got a mixture and {', '.join(also)}; "
            "move these into [[data.sources]]"
        ]
    kinds = {source.kind for _, source in keyed_sources(config)}
    if config.has_pairs and len(kinds) > 1:
        return [
            f"data.sources: expected pairs alone, whose loss is another, got {', '.join(sorted(kinds))}; "
            "train on the others in a run of its own"
        ]
    if config.has_pairs and config.pack:
        return ["data.pack: expected false, since each pair has a row of its own, got true; set it to false"]
    names = [source_name(source) for source in config.sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return [f"data.sources: the name {twice[0]!r} occurs twice; give each source its own `name`"]
    return []


def _stream_problems(config: DataConfig) -> list[str]:
    problems = []
    if config.seq_len < 2:
        problems.append(f"data.seq_len: expected at least 2 tokens a row, got {config.seq_len}; raise it")
    if not 0.0 <= config.holdout <= 1.0:
        problems.append(
            f"data.holdout: expected a fraction from 0 to 1, got {config.holdout}; 0.01 keeps one document "
            "in 100"
        )
    problems += at_least("data", vars(config), {"num_workers": 0, "prefetch": 0})
    problems += one_of("data", vars(config), {"on_error": get_args(OnError)})
    if config.vocab_size is not None and config.vocab_size < 1:
        problems.append(f"data.vocab_size: expected a positive size, got {config.vocab_size}; remove the key")
    if config.cursors is not None and config.cursors < 1:
        problems.append(f"data.cursors: expected at least 1, got {config.cursors}; remove the key")
    if config.piece_len is not None and config.piece_len < config.seq_len:
        problems.append(
            f"data.piece_len: expected at least data.seq_len = {config.seq_len}, got {config.piece_len}; "
            "remove the key"
        )
    if config.piece_len is not None and not config.shuffle:
        problems.append(
            "data.piece_len: only shuffled documents are read in pieces; remove it or set data.shuffle"
        )
    if not config.tokenizer:
        problems.append('data.tokenizer: expected "bytes" or a path, got an empty string; remove the key')
    if config.tokenizer == "bytes" and (config.eos_token or config.bos_token):
        problems.append(
            "data.eos_token, data.bos_token: the byte tokenizer has its own end of text and takes "
            "neither; remove them"
        )
    return problems


DEFAULT_GLOBS: dict[str, tuple[str, ...]] = {
    "text": ("*.txt", "*.txt.gz"),
    "jsonl": ("*.jsonl", "*.jsonl.gz"),
    "parquet": ("*.parquet",),
    **dict.fromkeys(("chat", "completion", "preference"), ("*.jsonl", "*.jsonl.gz", "*.parquet")),
    "tokens": ("*.npy", "*.bin"),
}
"""The files of a folder that a kind reads, unless `glob` says otherwise."""


def _kind_of(path: str) -> str:
    """The first kind whose files have such names; text where none has."""
    fits = (kind for kind, globs in DEFAULT_GLOBS.items() if any(fnmatch(path, each) for each in globs))
    return next(fits, "text")


def _source_problems(key: str, source: SourceConfig) -> list[str]:
    if source.kind not in get_args(SourceKind):
        return one_of(key, vars(source), {"kind": get_args(SourceKind)})
    problems = []
    if source.kind == "python-stdlib" and source.path:
        problems.append(
            f"{key}.path: python-stdlib reads the running Python's own sources and takes no path, "
            f'got {source.path!r}; remove it or set {key}.kind = "{_kind_of(source.path)}"'
        )
    if source.kind != "python-stdlib" and not source.path and not source.dataset:
        problems.append(
            f"{key}.path: expected a file, directory or glob for kind {source.kind!r}, got none; set it"
        )
    if source.path and source.dataset:
        problems.append(
            f"{key}.dataset: expected a path or a dataset, got {source.path!r} and {source.dataset!r}; "
            "remove one"
        )
    if not (math.isfinite(source.weight) and source.weight > 0):
        problems.append(
            f"{key}.weight: expected a positive number, got {source.weight}; remove the source instead"
        )
    if source.max_bytes is not None and source.max_bytes < 1:
        problems.append(
            f"{key}.max_bytes: expected a positive size, got {source.max_bytes}; remove the key to read all"
        )
    problems += one_of(key, vars(source), {"dtype": get_args(TokenDtype)})
    return problems + _misplaced_options(key, source)


def require_holdout(fraction: float, num_rows: int = 1) -> None:
    """Refuse to evaluate where nothing is held out: no fraction of the documents, or none with a row."""
    if fraction == 0 or num_rows == 0:
        raise ConfigError(
            f"data.holdout: expected a fraction above 0 to evaluate on, got {fraction}; raise it (0.01 is "
            "usual), or set train.eval_interval = -1 to evaluate never"
        )


_RECORDS = ("chat", "completion", "preference")
_OPTION_KINDS: dict[str, tuple[str, ...]] = {
    "dataset": ("text", *_RECORDS),
    "glob": ("text", "jsonl", "parquet", *_RECORDS, "tokens"),
    "field": ("jsonl", "parquet", "chat"),
    "separator": ("text",),
    "max_bytes": ("text", "jsonl", "parquet", *_RECORDS, "python-stdlib"),
    "document_end": ("tokens",),
    "dtype": ("tokens",),
}


def _set_here(source: SourceFiles, defaults: type[SourceFiles]) -> list[str]:
    names = [each.name for each in fields(SourceFiles)]
    return [name for name in names if getattr(source, name) != getattr(defaults, name)]


def _misplaced_options(key: str, source: SourceConfig) -> list[str]:
    """An option that this kind does not read would be a silent no-op: say so instead."""
    set_here = _set_here(source, SourceFiles)
    problems = [
        f"{key}.{option}: kind {source.kind!r} does not use it (only {', '.join(kinds)}); remove it"
        for option, kinds in _OPTION_KINDS.items()
        if option in set_here
        and source.kind not in kinds
        and not (option == "field" and source.kind == "text" and source.dataset)
    ]
    of_files, of_datasets = ("glob", "separator"), ("subset", "split")
    kept, other = (of_files, "path") if source.dataset else (of_datasets, "dataset")
    return problems + [
        f"{key}.{option}: belongs to {key}.{other}, which is not set; remove it"
        for option in kept
        if option in set_here and not getattr(source, other)
    ]


def check_batch(global_batch_size: int, micro_batch_size: int, *, dp_size: int) -> None:
    """Refuse a global batch that cannot be dealt evenly to the ranks that read different rows."""
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    refuse(at_least("train", sizes, dict.fromkeys(sizes, 1)))
    multiple = dp_size * micro_batch_size
    if global_batch_size % multiple:
        share, rest = divmod(global_batch_size, dp_size)
        wanted = f"{multiple}"
        if global_batch_size > multiple:
            wanted = f"a multiple of {multiple}, such as {-(-global_batch_size // multiple) * multiple}"
        divisor = "1" if share == 1 else f"a divisor of {share}"
        raise ConfigError(
            f"train.global_batch_size: {global_batch_size} sequences cannot be divided over {dp_size} "
            f"data-parallel ranks in micro-batches of {micro_batch_size}; choose {wanted}"
            + (f", or {divisor} for train.micro_batch_size" if not rest else "")
        )
