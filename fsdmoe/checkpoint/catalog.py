"""The checkpoints of one folder: which there are, in what order they were finished, which may go.

Order is by serial, a count kept in the manifests, not by step: a run that was set back to step 100 and
saved again at 150 resumes there, whatever an abandoned future left at step 200.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Container
from dataclasses import dataclass

from fsdmoe.checkpoint.config import RUN_FOLDER
from fsdmoe.checkpoint.dcp_folder import DCP_METADATA
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import MANIFEST
from fsdmoe.checkpoint.hf_folder import is_hf_folder
from fsdmoe.checkpoint.limited_storage import Limits
from fsdmoe.checkpoint.reader import peek_serial
from fsdmoe.checkpoint.storage import Storage, StrPath, open_storage, split_address
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import near_file

logger = logging.getLogger(__name__)

LATEST_WORD = "latest"


@dataclass(frozen=True)
class Entry:
    name: str
    serial: int
    """0 of one that cannot be read."""
    step: int


def name_for(step: int, taken: list[str]) -> str:
    """``step_00000500``; with a count behind it where an earlier start of the run already used the name."""
    base = name = f"step_{step:08d}"
    count = 1
    while name in taken:
        count += 1
        name = f"{base}.{count}"
    return name


def entries(storage: Storage) -> list[Entry]:
    """Whole checkpoints that a run has saved, the newest first. One whose manifest cannot be read may be the
    newest: it stands before all others, so that whoever wants the newest finds it damaged and says so.

    Folders of other names were put there by a person (a base model, a copy to keep): no run goes on from them
    by itself, and none deletes them."""
    return [entry for entry in all_entries(storage) if entry.step >= 0]


def all_entries(storage: Storage) -> list[Entry]:
    """The same with those of any name."""
    found = [Entry(name, peek_serial(storage, name), _step_of(name)) for name in storage.names()]
    return sorted(found, key=lambda entry: (entry.serial or math.inf, entry.step), reverse=True)


def retain(storage: Storage, keep_last: int, keep_every: int, damaged: Container[str] = ()) -> list[str]:
    """Delete what need not be kept; the names that went. The newest is never among them. Those that are known
    to be damaged are not counted, since nothing can go on from them, and stay for a person to look at.

    What cannot be deleted is a warning, and tried again at the next call: a checkpoint too many costs space,
    an error here would cost the run.
    """
    gone = []
    try:
        for name in storage.sweep():
            logger.warning("%s/%s is still there after its deletion; it is tried again", storage.root, name)
        found = entries(storage) or all_entries(storage)  # a program of one's own may have named them all
        whole = [entry for entry in found if entry.serial and entry.name not in damaged]
        for name in _passing(whole[max(1, keep_last) :], keep_every):
            if _is_deleted(storage, name):
                gone.append(name)
    except Exception as error:  # drivers of object stores raise errors of their own kinds
        logger.warning("%s: old checkpoints cannot be listed, so none is deleted: %s", storage.root, error)
    return gone


def to_be_deleted(storage: Storage, keep_every: int) -> list[str]:
    """Those that :func:`retain` deletes sooner or later, as others are saved."""
    return _passing(entries(storage), keep_every)


def _passing(found: list[Entry], keep_every: int) -> list[str]:
    """Names without those that are kept for good, and unreadable ones, which a person may look at."""
    return [
        entry.name
        for entry in found
        if entry.serial != 0 and not (keep_every and entry.step >= 0 and entry.step % keep_every == 0)
    ]


def _is_deleted(storage: Storage, name: str) -> bool:
    try:
        storage.delete(name)
    except Exception as error:  # as above
        text = "%s/%s could not be deleted and takes space; it is tried again after the next save: %s: %s"
        logger.warning(text, storage.root, name, type(error).__name__, error)
        return False
    return True


def resolve(path: StrPath, limits: Limits | None = None) -> tuple[str, list[str], bool]:
    """What a path to load means: the root of its storage, the candidates in order, and whether it names one
    checkpoint.

    A folder with a manifest, or a Hugging Face model, is that and nothing else. A folder of checkpoints, or
    ``latest`` in it, is these from the newest to the oldest; a run's folder is its folder of checkpoints.
    """
    text = os.fspath(path).rstrip("/")
    storage, name = split_address(text, limits)
    if storage.size(name, MANIFEST) is not None or is_hf_folder(storage, name):
        return storage.root, [name], True
    folder = storage if name == LATEST_WORD else open_storage(text, limits)
    found = entries(folder) or all_entries(folder)
    run = open_storage(f"{text}/{RUN_FOLDER}", limits)
    if not found and name != LATEST_WORD and (inside := entries(run)):
        folder, found = run, inside
    return folder.root, [entry.name for entry in found], False


def require(path: StrPath, limits: Limits | None = None) -> tuple[str, list[str], bool]:
    """As :func:`resolve`, but finding nothing is an error."""
    root, names, explicit = resolve(path, limits)
    if not names:
        beside, name = split_address(path, limits)
        if beside.size(name, DCP_METADATA) is not None:
            raise CheckpointError(
                f"{os.fspath(path)}: no checkpoint here but a folder of torch.distributed.checkpoint, whose "
                "metadata is a pickle; convert it once with `python -m fsdmoe.checkpoint from-dcp` and load "
                "the result"
            )
        if "://" not in os.fspath(path) and not os.path.exists(os.path.expanduser(path)):
            fix = near_file(os.fspath(path).rstrip("/")) or "name the folder of a checkpoint or of a run"
            raise CheckpointError(f"{os.fspath(path)}: no checkpoint here: it does not exist; {fix}")
        raise CheckpointError(
            f"{os.fspath(path)}: no checkpoint here: no {MANIFEST}, nor folders with one, nor a Hugging Face "
            "folder's *.safetensors; name the folder of one (a model of the Hub: download it first)"
        )
    return root, names, explicit


def require_start(
    path: str, *, weights_only: bool, limits: Limits | None = None
) -> tuple[str, list[str], bool]:
    """What a run starts from, as of :func:`require`. A Hugging Face model has weights only, and is refused
    where more is wanted."""
    root, names, explicit = require(path, limits)
    if explicit and not weights_only and open_storage(root, limits).size(names[0], MANIFEST) is None:
        raise ConfigError(
            f"checkpoint.load: {path} is a Hugging Face model, which has weights only; "
            "set checkpoint.load_only_model = true"
        )
    return root, names, explicit


def _step_of(name: str) -> int:
    found = re.fullmatch(r"step_(\d+)(\.\d+)?", name)
    return int(found.group(1)) if found else -1
