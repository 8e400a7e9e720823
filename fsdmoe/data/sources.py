"""A configured source to a token store: found, tokenised once, cached, mapped."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import counted
from fsdmoe.data import cache
from fsdmoe.data.cache import cache_folder, open_or_build, say
from fsdmoe.data.chat_records import FIELDS, Content, Conversation, Preference
from fsdmoe.data.chunks import index_blocks
from fsdmoe.data.config import DataConfig, SourceConfig, keyed_sources, source_name
from fsdmoe.data.files import SourceFile, find_files, why_not_writable
from fsdmoe.data.pretokenised import check_first_ids, check_ids, index_tokens, offset_files, open_tokens
from fsdmoe.data.readers import Dropped, Record, first_document, no_documents, read_documents
from fsdmoe.data.store import StoreWriter, TokenStore, open_store
from fsdmoe.data.token_types import TokenArray
from fsdmoe.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from fsdmoe.data.chat import ChatEncoder

logger = logging.getLogger(__name__)

# Part of every cache key: raise it when the meaning of the files changes.
_FORMAT = 1
_TOKENS_FORMAT = 2  # of an index of files that were tokenised before
_CHAT_FORMAT = 4  # of what carries loss in a chat, and of what is said about it
_PAIR_FORMAT = 2
_READABLE = 1  # of what counts as a record that can be read
_DOCUMENTS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 1 << 23

Encoded = tuple[TokenArray, npt.NDArray[np.uint8] | None]


def check_data(config: DataConfig) -> Tokenizer:
    """Look whether the files a section names are there, the cache can be written and its tokenizer used,
    which it returns; report everything that is wrong. Takes milliseconds, and as long as the tokenizer takes
    to load."""
    problems, tokenizer = data_problems(config)
    if problems or tokenizer is None:
        raise ConfigError(*problems)
    return tokenizer


def data_problems(config: DataConfig, *, is_plan: bool = False) -> tuple[list[str], Tokenizer | None]:
    """Everything that is wrong, and the tokenizer where it can be used. ``is_plan``: nothing is made on the
    disk, and the first document of each source is read, which a run leaves to the tokenising."""
    of_sources: list[str] = []
    others: list[str] = []
    tokenizer = None
    encoder = None
    root = cache_folder(config.cache_dir)
    if why := why_not_writable(root, make=not is_plan):
        others.append(f"data.cache_dir: expected a folder to write to, got '{root}' ({why}); name another")
    with _noting(others):
        tokenizer = _fitting_tokenizer(config)
        encoder = _chat_encoder(config, tokenizer)
    for key, source in keyed_sources(config):
        with _noting(of_sources):
            if is_plan and source.dataset and not _is_at_hand(source):
                continue
            files = find_files(key, source)
            if is_plan and source.kind != "tokens":
                content = first_document(key, source, files, Dropped(config.on_error))
                if encoder is not None and source.kind in FIELDS:
                    encoder.encode(content)
            elif is_plan and tokenizer is not None:
                check_first_ids(key, source, files, config.vocab_size or tokenizer.vocab_size)
    return of_sources + others, tokenizer


def _is_at_hand(source: SourceConfig) -> bool:
    """Whether a dataset can be looked at without downloading or converting it."""
    from fsdmoe.data.hf_dataset import is_saved_dataset  # an optional dependency: imported only when chosen

    return is_saved_dataset(source.dataset)


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """What is refused in here becomes lines, and the next part is looked at."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except ImportError as error:
        problems.append(str(error))


def _fitting_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer, after checking that it has what the rest of the section needs."""
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token, bos_token=config.bos_token)
    kinds = {source.kind for _, source in keyed_sources(config)}
    if kinds != {"tokens"} and (config.vocab_size or tokenizer.vocab_size) < tokenizer.vocab_size:
        raise ConfigError(
            f"data.vocab_size: expected at least the tokenizer's {tokenizer.vocab_size}, got "
            f"{config.vocab_size}; remove the key"
        )
    if tokenizer.own_bos and not config.bos_token and kinds - {"tokens", "chat"}:
        logger.warning(
            'data.bos_token: %s begins each text with %s, this run puts it before none; write bos_token = '
            '"%s" for a model that was trained so',
            config.tokenizer, tokenizer.own_bos, tokenizer.own_bos,
        )  # fmt: skip
    return tokenizer


def _chat_encoder(config: DataConfig, tokenizer: Tokenizer) -> ChatEncoder | None:
    """None where there are no chats."""
    kinds = {source.kind for _, source in keyed_sources(config)} & FIELDS.keys()
    if not kinds:
        return None
    # Optional dependencies: imported only when chosen.
    from fsdmoe.data.chat import ChatEncoder
    from fsdmoe.data.chat_template import ChatTemplate

    names = {"bos_token": config.bos_token, "eos_token": config.eos_token}
    given = {name: token for name, token in names.items() if token}
    template = ChatTemplate(config.tokenizer, config.chat_template, given)
    template.check(tokenizer, is_needed="chat" in kinds)
    return ChatEncoder(tokenizer, template, config.chat_loss_roles)


def open_sources(config: DataConfig) -> tuple[list[TokenStore], int]:
    """The token store of each source, and the vocabulary size."""
    tokenizer = check_data(config)
    encoder = _chat_encoder(config, tokenizer)
    vocab_size = config.vocab_size or tokenizer.vocab_size
    root = cache_folder(config.cache_dir)
    stores = []
    for key, source in keyed_sources(config):
        if source.kind == "tokens":
            stores.append(_open_pretokenised(root, key, source, vocab_size))
        else:
            of_chats = encoder if source.kind in FIELDS else None
            stores.append(_open_tokenised(root, key, source, config, tokenizer, of_chats))
        if source.kind == "preference":
            _require_whole_pairs(stores[-1], config.seq_len)
    return stores, vocab_size


def _require_whole_pairs(store: TokenStore, seq_len: int) -> None:
    longest = max(int(store.lengths(block).max()) for block in index_blocks(store))
    if longest > seq_len:
        raise ConfigError(
            f"data.seq_len: expected rows for the longest pair of {store.name}, the chosen answer and the "
            f"rejected one with their prompts, which has {longest} tokens, got {seq_len}; raise it, or "
            "remove long pairs"
        )


def _open_tokenised(
    root: Path,
    key: str,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    encoder: ChatEncoder | None,
) -> TokenStore:
    files = find_files(key, source)
    name = source_name(source)
    options: list[Any] = [source.kind, source.field, source.separator, source.max_bytes]
    options += [tokenizer.fingerprint, tokenizer.eos_id, tokenizer.bos_id]
    if encoder is not None:
        options += [_CHAT_FORMAT, *encoder.facts]
    if source.kind == "preference":
        options += [_PAIR_FORMAT]
    if source.dataset:
        options += [source.dataset, source.subset, source.split]
    if config.on_error != "stop":  # what was tokenised before there was this key keeps its place
        options += [config.on_error, _READABLE]

    def build(folder: Path) -> None:
        _tokenise(folder, key, source, files, tokenizer, encoder, Dropped(config.on_error))

    return open_store(open_or_build(root, _cache_key(options, files), build), name=name)


def _open_pretokenised(root: Path, key: str, source: SourceConfig, vocab_size: int) -> TokenStore:
    files = find_files(key, source)
    arrays = open_tokens(key, source, [file.path for file in files])
    options = [source.kind, _TOKENS_FORMAT, source.dtype, source.document_end]
    cache_key = _cache_key(options, [*files, *offset_files(files)])
    folder = open_or_build(root, cache_key, lambda folder: index_tokens(folder, key, source, files, arrays))
    check_ids(folder, vocab_size)
    return open_store(folder, name=source_name(source), shards=arrays)


def _cache_key(options: list[Any], files: list[SourceFile]) -> str:
    """Files are identified by path, size and time of change: comparing their content would read terabytes at
    each start."""
    listing = [(str(file.path.absolute()), file.size, file.mtime_ns) for file in files]
    description = json.dumps([_FORMAT, options, listing])
    return hashlib.blake2b(description.encode(), digest_size=16).hexdigest()


def _tokenise(
    folder: Path,
    key: str,
    source: SourceConfig,
    files: list[SourceFile],
    tokenizer: Tokenizer,
    encoder: ChatEncoder | None,
    dropped: Dropped,
) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    writer = StoreWriter(folder, dtype=dtype, with_targets=encoder is not None)
    began = spoke = time.monotonic()
    num_records = 0
    unlearnt = Dropped()
    for batch in _batches(read_documents(key, source, files, dropped)):
        num_records += len(batch)
        for tokens, targets in _encode(batch, tokenizer, encoder, dropped, unlearnt):
            writer.add(tokens, targets)
        if time.monotonic() - spoke > cache.SAY_EVERY_SECONDS:
            spoke = time.monotonic()
            say(
                f"tokenising {source_name(source)}: file {batch[-1].file_number + 1} of {len(files)}, "
                f"{writer.num_documents:,} documents, {writer.num_tokens / 1e6:,.1f} M tokens"
            )
    writer.close({"dropped": dropped.counts, "without_loss": str(unlearnt)})
    if writer.num_documents == 0:
        raise no_documents(key, source, dropped)
    if encoder is not None and writer.num_targets == 0:
        raise ConfigError(
            f"data.chat_loss_roles: no turn of {source_name(source)} has one of these roles, so there is "
            "nothing to learn; name the roles your records use"
        )
    say(
        f"tokenised {source_name(source)}: {counted(writer.num_documents, 'document')}, "
        f"{writer.num_tokens:,} tokens in {time.monotonic() - began:.1f} s"
    )
    if writer.num_documents > num_records:
        say(
            f"{num_records:,} conversations of {source_name(source)} became {writer.num_documents:,} "
            "documents: the chat template writes earlier turns differently, so answers are learnt one by one"
        )
    if dropped.counts:
        say(f"left out of {source_name(source)}: {dropped}")
    if unlearnt.counts:
        say(f"warning: {source_name(source)} has {unlearnt}")


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """A few hundred documents at a time: enough for a tokenizer's threads, few enough for memory."""
    batch: list[Record] = []
    num_characters = 0
    for record in records:
        batch.append(record)
        num_characters += len(record.content) if isinstance(record.content, str) else 0
        if len(batch) == _DOCUMENTS_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[Record],
    tokenizer: Tokenizer,
    encoder: ChatEncoder | None,
    dropped: Dropped,
    unlearnt: Dropped,
) -> Iterator[Encoded]:
    if encoder is None:
        for tokens in tokenizer.encode_batch([str(record.content) for record in batch]):
            yield _with_ends(tokens, tokenizer), None
        return
    for record in batch:
        try:
            documents = encoder.encode(record.content)
        except ConfigError as error:
            dropped.add_error(error)
            continue
        if not any((targets == 1).any() for _, targets in documents):
            unlearnt.add("records without a token with loss", _speakers(record.content))
        yield from documents


def _speakers(content: Content) -> str:
    """Where a conversation is, and whose turns it has."""
    talk = content.chosen if isinstance(content, Preference) else content
    if not isinstance(talk, Conversation):
        return "a completion"
    roles = dict.fromkeys(message["role"] for message in talk.messages)
    return f"{talk.where.partition(': ')[2]}, with turns of {', '.join(roles)}"


def _with_ends(tokens: TokenArray, tokenizer: Tokenizer) -> TokenArray:
    """Put bos and eos around a document."""
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return np.concatenate([np.array(head, tokens.dtype), tokens, np.array([tokenizer.eos_id], tokens.dtype)])
