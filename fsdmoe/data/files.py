"""From what the user wrote as a path to a sorted list of files."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import near_file
from fsdmoe.data.config import DEFAULT_GLOBS, SourceConfig

# Left out of the standard-library corpus: third-party packages, compiled files, and tests, some of which are
# deliberately broken source or not UTF-8.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_LARGEST_POINTER = 1024
"""Bytes; those of git-lfs have some 130."""
OFFSETS_SUFFIX = ".offsets.npy"


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: Path
    size: int
    mtime_ns: int


def find_files(key: str, source: SourceConfig) -> list[SourceFile]:
    """The files of a source, in reading order. Raises a `ConfigError` when there are none."""
    if source.kind == "python-stdlib":
        return list(_stdlib_files(key))
    if source.dataset:
        from fsdmoe.data.hf_dataset import dataset_files  # an optional dependency: imported only when chosen

        return [_describe(key, path) for path in dataset_files(key, source)]
    path = Path(source.path).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        patterns = (source.glob,) if source.glob else DEFAULT_GLOBS[source.kind]
        found = [p for p in {p for pattern in patterns for p in path.rglob(pattern)} if p.is_file()]
        if not found:
            raise ConfigError(
                f"{key}.glob: no file under {source.path} matches {' or '.join(patterns)}; set {key}.glob "
                "to match yours"
            )
    elif glob.has_magic(source.path):
        found = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not found:
            raise ConfigError(f"{key}.path: no file matches {source.path!r}; check the pattern")
    else:
        raise ConfigError(
            f"{key}.path: expected a file, directory or glob, got {source.path!r}, which does not exist "
            f"(seen from {Path.cwd()}); {near_file(source.path) or 'check the path'}"
        )
    if source.kind == "tokens":
        found = [p for p in found if not p.name.endswith(OFFSETS_SUFFIX)]
    # The order is part of what a run reads; that of paths themselves is another one: "a/x" before "a-b/x".
    files = [_describe(key, p) for p in sorted(found, key=Path.as_posix)]
    if sum(file.size for file in files) == 0:
        raise ConfigError(f"{key}.path: the {len(files)} file(s) of {source.path} are empty; give some text")
    return files


def why_not_writable(folder: Path, *, make: bool) -> str:
    """Why a folder cannot be written to; empty where it can. Makes it and writes to it, or finds out without
    making it."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return ""
        there = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if there is None:
            return ""
        if not there.is_dir():
            return f"{there} is no folder"
        return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"
    except OSError as error:
        return error.strerror or str(error)


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the few lines that git leaves in place of one that git-lfs has not fetched."""
    try:
        if path.stat().st_size > _LARGEST_POINTER:
            return False
        return path.read_bytes().startswith(b"version https://git-lfs.github.com/")
    except OSError:
        return False


def _describe(key: str, path: Path) -> SourceFile:
    try:
        stat = path.stat()
        readable = os.access(path, os.R_OK)
    except OSError as error:
        raise ConfigError(
            f"{key}.path: cannot look at {path} ({error.strerror}); check its permissions"
        ) from error
    if not readable:
        raise ConfigError(f"{key}.path: cannot read {path}; check its permissions")
    if stat.st_size <= _LARGEST_POINTER and is_lfs_pointer(path):
        raise ConfigError(
            f"{key}.path: {path} is a pointer of git-lfs, not the data; run `git lfs pull` in "
            f"{path.parent}, or download it again"
        )
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)


@functools.cache  # asked for twice at every start, and an interpreter's own files stay as they are
def _stdlib_files(key: str) -> tuple[SourceFile, ...]:
    """The running Python's own sources, in the order of a hash of their names.

    Hash order, so that a corpus cut short by `max_bytes` is a fair sample and not the modules from A to C.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise ConfigError(
            f'{key}.kind: this Python has no sources under {root}; set kind = "text" and a path'
        )

    def hashed(path: Path) -> bytes:
        return hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=8).digest()

    return tuple(_describe(key, path) for path in sorted(found, key=hashed))
