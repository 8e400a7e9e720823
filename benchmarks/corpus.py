"""A corpus of source code and documentation from pinned archives of Python packages, tokenised.

``corpus_archives.txt`` pins each archive by name, version and hash. They are downloaded from the index that
pip uses and only read: nothing of them is installed or run. Then

    files       sources and documentation, of a readable size and in UTF-8; no generated tables
    duplicates  a file whose text, or most of whose lines, came before is left out
    held out    whole projects, chosen by their names' hashes, so that no line of theirs is trained on; they
                come first, so that copies of their files are left out elsewhere
    tokens      a byte-level BPE of 32,768, trained on the part that is trained on

The folder then holds ``train.bin`` and ``held_out.bin`` (uint16, with ``.offsets.npy``: ``data.kind =
"tokens"``), ``tokenizer.json`` and ``manifest.json`` with the hashes of all archives and files;
``--pack`` also writes it as one ``.tar.xz``.

    python benchmarks/corpus.py runs/corpus --pack runs/corpus.tar.xz
    python benchmarks/corpus.py --pin flask jinja2 >> benchmarks/corpus_archives.txt     add the newest ones
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import os
import re
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PINNED = Path(__file__).with_name("corpus_archives.txt")
VOCAB_SIZE = 32_768
END = "<|endoftext|>"
SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".md", ".rst", ".txt")
MIN_BYTES, MAX_BYTES = 200, 200_000
HELD_OUT_SHARE = 0.04
"""Of the projects."""
MAX_KNOWN_LINES = 0.6
"""Of a file's lines that came before; with more it is a copy."""
SAMPLE_BYTES = 16_000_000
"""Of text that the tokenizer is trained on, evenly taken."""


class Archive(NamedTuple):
    """A pinned archive."""

    project: str
    version: str
    sha256: str

    @classmethod
    def read(cls, line: str) -> Archive:
        named, _, sha256 = line.partition(" ")
        project, _, version = named.partition("==")
        if not (version and re.fullmatch("[0-9a-f]{64}", sha256)):
            raise SystemExit(f"expected NAME==VERSION SHA256, got {line!r}")
        return cls(project, version, sha256)

    @property
    def is_held_out(self) -> bool:
        return int(hashlib.sha256(self.project.encode()).hexdigest()[:8], 16) < HELD_OUT_SHARE * 2**32


# Archives


def index_url() -> str:
    """Of the index that pip uses."""
    if given := os.environ.get("PIP_INDEX_URL"):
        return given.rstrip("/")
    from pip._internal.models.index import PyPI  # the one place that names it

    return PyPI.simple_url.rstrip("/")


def listed(project: str, index: str) -> list[tuple[str, str, str]]:
    """File name, hash and address of every source archive of a project, the oldest first."""
    address = f"{index}/{re.sub('[-_.]+', '-', project).lower()}/"
    try:
        with urllib.request.urlopen(address, timeout=180) as answer:
            page = answer.read().decode()
    except urllib.error.HTTPError as error:
        print(f"{project}: {error}", file=sys.stderr)
        return []
    links = (
        urllib.parse.urljoin(address, html.unescape(link)) for link in re.findall(r'href="([^"]+)"', page)
    )
    found = re.compile(r"(?P<url>.*/(?P<name>[^/]+(\.tar\.gz|\.zip)))#sha256=(?P<hash>[0-9a-f]{64})")
    matches = (found.fullmatch(link) for link in links)
    return [(match["name"], match["hash"], match["url"]) for match in matches if match]


def pin(projects: Iterable[str], index: str) -> Iterator[str]:
    """The lines of the newest release of each project that has a source archive."""
    for project in projects:
        releases = [
            (match["version"], sha256)
            for name, sha256, _ in listed(project, index)
            if (match := re.fullmatch(r".+-(?P<version>\d+(\.\d+)*)(\.tar\.gz|\.zip)", name))
        ]
        if releases:
            newest = max(releases, key=lambda release: [int(part) for part in release[0].split(".")])
            yield f"{project}=={newest[0]} {newest[1]}"
        else:
            print(f"{project}: no source archive", file=sys.stderr)


def fetch(archive: Archive, folder: Path, index: str) -> Path:
    """The archive's file, downloaded unless it is there, and of the pinned hash."""
    kept = [path for path in folder.glob(f"{archive.sha256}.*") if not path.name.endswith(".part")]
    if not kept:
        urls = [url for _, sha256, url in listed(archive.project, index) if sha256 == archive.sha256]
        if not urls:
            raise SystemExit(f"{archive.project}=={archive.version}: the index has no archive of its hash")
        path = folder / f"{archive.sha256}.{'zip' if urls[0].endswith('.zip') else 'tar.gz'}"
        part = path.with_name(f"{path.name}.part")
        with urllib.request.urlopen(urls[0], timeout=180) as answer:
            part.write_bytes(answer.read())
        kept = [part.rename(path)]
    found = hashlib.sha256(kept[0].read_bytes()).hexdigest()
    if found != archive.sha256:
        kept[0].unlink()
        raise SystemExit(f"{archive.project}=={archive.version}: expected {archive.sha256}, got {found}")
    return kept[0]


def texts(path: Path) -> Iterator[str]:
    """The readable sources and documentation in an archive, in the order of their names."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as opened:
            for member in sorted(opened.infolist(), key=lambda each: each.filename):
                if is_wanted(member.filename, member.file_size):
                    yield from readable(opened.read(member))
        return
    with tarfile.open(path) as opened:
        for info in sorted(opened.getmembers(), key=lambda each: each.name):
            if info.isfile() and is_wanted(info.name, info.size):
                content = opened.extractfile(info)
                assert content is not None
                yield from readable(content.read())


def is_wanted(name: str, size: int) -> bool:
    """By its name and size; metadata and vendored packages are somebody else's, or nobody's, text."""
    parts = name.lower().split("/")
    is_strange = any(re.search(r"vendor|third_party|egg-info|locale|node_modules", part) for part in parts)
    is_list = parts[-1] in ("requirements.txt", "sources.txt", "cmakelists.txt", "record.txt")
    return MIN_BYTES <= size <= MAX_BYTES and name.endswith(SOURCES) and not is_strange and not is_list


def readable(content: bytes) -> Iterator[str]:
    """The text, unless it is none, or a table."""
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    digits = sum(map(text.count, "0123456789"))
    if len(text) / (text.count("\n") + 1) < 150 and digits < 0.2 * len(text) and "\0" not in text:
        yield text


# Duplicates


@dataclass
class Seen:
    """What came before: whole texts and their lines, by hash."""

    texts: set[bytes] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def is_new(self, text: str) -> bool:
        """Whether a text is no copy, exact or nearly; it counts as seen from then on."""
        whole = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
        if whole in self.texts:
            return False
        self.texts.add(whole)
        lines = {hash(line) for each in text.split("\n") if len(line := each.strip()) >= 20}
        known = sum(line in self.lines for line in lines)
        self.lines |= lines
        return known <= MAX_KNOWN_LINES * len(lines)


# Tokens


def train_tokenizer(documents: list[str]) -> Any:
    """A byte-level BPE of an even sample."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    total = sum(map(len, documents))
    every = max(1, total // SAMPLE_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents[::every], trainer)
    return tokenizer


def write_tokens(folder: Path, name: str, documents: list[str], tokenizer: Any) -> int:
    """``name.bin`` and its offsets; how many tokens."""
    end = tokenizer.token_to_id(END)
    offsets = [0]
    with (folder / f"{name}.bin").open("wb") as file:
        for first in range(0, len(documents), 512):
            for encoded in tokenizer.encode_batch_fast(documents[first : first + 512]):
                ids = np.array([*encoded.ids, end], dtype="<u2")
                file.write(ids.tobytes())
                offsets.append(offsets[-1] + len(ids))
    np.save(folder / f"{name}.offsets.npy", np.array(offsets, dtype=np.int64))
    return offsets[-1]


# The corpus


def build(folder: Path, archives: list[Archive], cache: Path, index: str) -> dict[str, Any]:
    """Write the corpus to ``folder``; its manifest."""
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    archives = sorted(archives, key=lambda archive: (not archive.is_held_out, archive.project))
    if not any(archive.is_held_out for archive in archives):
        raise SystemExit("expected a project whose name's hash holds it out, got none; pin more archives")
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda archive: fetch(archive, cache, index), archives))
    documents: dict[bool, list[str]] = {True: [], False: []}
    seen, rows = Seen(), []
    for archive, path in zip(archives, paths, strict=True):
        read = list(texts(path))
        kept = [text for text in read if seen.is_new(text)]
        documents[archive.is_held_out] += kept
        rows.append(
            {**archive._asdict(), "held_out": archive.is_held_out, "files": len(kept),
             "copies": len(read) - len(kept), "bytes": sum(len(text.encode()) for text in kept)}
        )  # fmt: skip
    tokenizer = train_tokenizer(documents[False])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"train": False, "held_out": True}
    tokens = {name: write_tokens(folder, name, documents[held], tokenizer) for name, held in names.items()}
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    manifest = {"tokens": tokens, "vocab_size": VOCAB_SIZE, "archives": rows, "files": hashes}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


def pack(folder: Path, out: Path) -> int:
    """The folder as one ``.tar.xz``, for 16-bit numbers; its bytes. The same folder gives the same bytes."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]
    with (
        lzma.open(out, "wb", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        for path in sorted(folder.iterdir()):
            info = tar.gettarinfo(path, arcname=f"corpus/{path.name}")
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            with path.open("rb") as file:
                tar.addfile(info, file)
    return out.stat().st_size


def show(manifest: dict[str, Any]) -> None:
    rows = manifest["archives"]
    for name, held in (("train", False), ("held_out", True)):
        own = [row for row in rows if row["held_out"] is held]
        files, copies, size = (sum(row[key] for row in own) for key in ("files", "copies", "bytes"))
        print(f"{name}: {len(own)} projects, {files:,} files ({copies:,} copies left out), "
              f"{size / 1e6:.1f} MB, {manifest['tokens'][name] / 1e6:.2f} M tokens")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the corpus goes")
    parser.add_argument("--archives", type=Path, default=PINNED, help="the pinned list")
    parser.add_argument("--cache", type=Path, default=Path("runs/archives"), help="where archives are kept")
    parser.add_argument("--index", help="of packages; without it pip's")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="also as one .tar.xz")
    parser.add_argument("--pin", nargs="+", metavar="NAME", help="only print lines of newest archives")
    args = parser.parse_args()
    index = args.index or index_url()
    if args.pin:
        print("\n".join(pin(args.pin, index)))
        return 0
    if args.folder is None:
        parser.error("expected a folder for the corpus")
    lines = args.archives.read_text(encoding="utf-8").splitlines()
    show(build(args.folder, [Archive.read(line) for line in lines if line.strip()], args.cache, index))
    if args.pack:
        print(f"{args.pack}: {pack(args.folder, args.pack) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
