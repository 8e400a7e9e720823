"""The checkpoints of one folder: which there are, in what order they were finished, which may go.

Order is by serial, a count kept in the manifests, not by step: a run that was set back to step 100 and
saved again at 150 resumes there, whatever an abandoned future left at step 200.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import MANIFEST
from fsdmoe.checkpoint.hf_folder import is_hf_folder
from fsdmoe.checkpoint.reader import peek_serial
from fsdmoe.checkpoint.storage import Storage, open_storage, split_address

LATEST_WORD = "latest"


@dataclass(frozen=True)
class Entry:
    name: str
    serial: int
    step: int


def name_for(step: int, taken: list[str]) -> str:
    """``step_00000500``; with a count behind it where an earlier life of the run already used the name."""
    base = name = f"step_{step:08d}"
    count = 1
    while name in taken:
        count += 1
        name = f"{base}.{count}"
    return name


def entries(storage: Storage) -> list[Entry]:
    """Whole checkpoints, the newest first."""
    found = [Entry(name, peek_serial(storage, name), _step_of(name)) for name in storage.names()]
    return sorted(found, key=lambda entry: (entry.serial, entry.step), reverse=True)


def retain(storage: Storage, keep_last: int, keep_every: int) -> list[str]:
    """Delete what need not be kept; the names that went. The newest is never among them."""
    gone = []
    for entry in entries(storage)[max(1, keep_last) :]:
        if entry.serial == 0 or (keep_every and entry.step >= 0 and entry.step % keep_every == 0):
            continue  # unreadable ones are left for a person to look at
        storage.delete(entry.name)
        gone.append(entry.name)
    return gone


def resolve(path: str | os.PathLike[str]) -> tuple[Storage, list[str], bool]:
    """What a path to load means: the storage, the candidates in order, and whether it names one checkpoint.

    A folder with a manifest, or a Hugging Face model, is that and nothing else. A run's folder, or ``latest``
    in it, is its checkpoints from the newest to the oldest.
    """
    text = os.fspath(path).rstrip("/")
    storage, name = split_address(text)
    if storage.size(name, MANIFEST) is not None or is_hf_folder(storage, name):
        return storage, [name], True
    root = storage if name == LATEST_WORD else open_storage(text)
    return root, [entry.name for entry in entries(root)], False


def require(path: str | os.PathLike[str]) -> tuple[Storage, list[str], bool]:
    """As :func:`resolve`, but finding nothing is an error."""
    storage, names, explicit = resolve(path)
    if not names:
        raise CheckpointError(
            f"{os.fspath(path)}: no checkpoint here: no {MANIFEST}, nor folders with one, nor a Hugging Face "
            "folder's *.safetensors; name the folder of one (a model of the Hub: download it first)"
        )
    return storage, names, explicit


def _step_of(name: str) -> int:
    found = re.fullmatch(r"step_(\d+)(\.\d+)?", name)
    return int(found.group(1)) if found else -1
