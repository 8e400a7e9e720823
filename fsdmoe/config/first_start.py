"""What a run began with, in a line of its kept configuration, which is otherwise that of its last start::

    # First start: {"load": "/models/base", "load_only_model": true, "written": "base"}

So the command of the first start is known from another one, whatever starts came in between, and from any
working directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdmoe.checkpoint.config import RUN_FOLDER, CheckpointConfig
from fsdmoe.checkpoint.start_place import absolute_path, is_same_folder, place_of, real_path
from fsdmoe.config.schema import Config

_LINE = "# First start: "
_WORKING_DIRECTORY = "# Working directory: "


@dataclass(frozen=True)
class FirstStart:
    """Of the start that began the run, not of those that went on with it."""

    load: str
    """``checkpoint.load``, from the root where it is a path."""
    load_only_model: bool
    written: str
    """``checkpoint.load`` as it was written."""

    @classmethod
    def of(cls, checkpoint: CheckpointConfig) -> FirstStart:
        """A start that begins a run."""
        return cls(absolute_path(checkpoint.load), checkpoint.load_only_model, checkpoint.load)

    @classmethod
    def of_last(cls, table: Mapping[str, Any]) -> FirstStart:
        """The last start, by the kept ``checkpoint`` table: all that earlier versions have kept. From which
        working directory a path was written is not known."""
        load = str(table.get("load", "latest"))
        return cls(load, table.get("load_only_model") is True, load)

    def is_from(self, load: str) -> bool:
        """Whether it was with the same ``checkpoint.load``."""
        return real_path(self.load) == real_path(load)

    def line(self) -> str:
        """For the kept configuration."""
        return f"{_LINE}{json.dumps(dataclasses.asdict(self))}\n"


def read_first_start(text: str) -> FirstStart | None:
    """What the text of a kept configuration says of it; none in one of an earlier version."""
    line = next((line for line in text.splitlines() if line.startswith(_LINE)), "")
    try:
        values = json.loads(line.removeprefix(_LINE))
        return FirstStart(str(values["load"]), values["load_only_model"] is True, str(values["written"]))
    except (ValueError, KeyError, TypeError):  # no such line, or edited by hand
        return None


def working_directory_line() -> str:
    """For the kept configuration: where this start's relative paths begin."""
    return f"{_WORKING_DIRECTORY}{json.dumps(os.getcwd())}\n"


def folder_of_kept(folder: str, text: str) -> str:
    """A ``checkpoint.folder`` of the text of a kept configuration, as it is found from here. A relative one
    that is not here (it may be: in a copy of the project) is where the start that kept it was."""
    line = next((line for line in text.splitlines() if line.startswith(_WORKING_DIRECTORY)), "")
    if not line or absolute_path(folder) == folder or Path(folder).expanduser().exists():
        return folder
    there = Path(json.loads(line.removeprefix(_WORKING_DIRECTORY)), folder)
    return str(there) if there.exists() else folder


def line_to_keep(config: Config, text: str, *, has_checkpoints: bool) -> str:
    """The line for this start: of itself, unless it goes on with checkpoints of the run. Empty where nobody
    knows, since an earlier version began the run.

    Args:
        config: Of this start.
        text: The kept configuration of the last one; empty without one.
        has_checkpoints: Whether the run has checkpoints of its own.
    """
    checkpoint = config.checkpoint
    now, table = FirstStart.of(checkpoint), _checkpoint_table(text) or {}
    if not has_checkpoints or checkpoint.load == "none":
        return now.line()
    is_its_folder = is_same_folder(str(table.get("folder", "")), checkpoint.folder)
    began = read_first_start(text)
    if is_its_folder and began is not None:
        return began.line()
    # A last start that named no other checkpoint may have gone on with what another one began.
    known = [FirstStart.of_last(table), now] if is_its_folder else [now]
    return next((start.line() for start in known if _is_foreign(start.load, config)), "")


def start_to_go_on(table: Mapping[str, Any], text: str, root: Path) -> dict[str, Any]:
    """What to change in the kept ``checkpoint`` table of the run in ``root`` so that the run goes on."""
    load, began = str(table.get("load", "latest")), read_first_start(text)
    if began is None:
        own = str(table.get("folder") or root / RUN_FOLDER)
        is_foreign = place_of(load, own, str(root)) == "foreign"
    else:  # which tells a path that was written in another working directory
        is_foreign = load not in ("latest", "none") and (load == began.written or began.is_from(load))
    if not is_foreign:
        return {"load": "latest", "load_only_model": False}
    return {"load": load if began is None or began.is_from(load) else began.load}


def problems_of_another_start(config: Config, text: str, kept: Path) -> list[str]:
    """Why a run with checkpoints of its own cannot start from another one now: it goes on with these. The
    ``checkpoint.load`` that it began with stays allowed, since that is what is meant by it.

    Args:
        config: Of this start.
        text: The kept configuration of the last one.
        kept: Its file.
    """
    root, now, table = kept.parent, config.checkpoint, _checkpoint_table(text)
    if table is None or not is_same_folder(str(table.get("folder", "")), now.folder):
        return []
    if not _is_foreign(now.load, config):
        return []
    known = read_first_start(text)
    began = known or FirstStart.of_last(table)
    if not began.is_from(now.load):
        start = "was started with" if known else "was last started with"
        return [
            f'checkpoint.load: expected "latest", since {root} has checkpoints of its own and {start} '
            f"{began.load!r}, got {now.load!r}; drop the key to go on, or start a run of the same "
            f"configuration from there by --config {kept} --train.output_dir FOLDER "
            f"{'--checkpoint.folder OTHER ' if now.folder else ''}--checkpoint.load {now.load}"
        ]
    if now.load_only_model != began.load_only_model:
        wanted, got = (str(each).lower() for each in (began.load_only_model, now.load_only_model))
        return [
            f"checkpoint.load_only_model: expected {wanted}, as at the start from {now.load!r}, since {root} "
            f'goes on with its own checkpoints, got {got}; drop the key, or set checkpoint.load = "latest"'
        ]
    return []


def _is_foreign(load: str, config: Config) -> bool:
    root = Path(config.train.output_dir).expanduser()
    return place_of(load, config.checkpoint.folder or str(root / RUN_FOLDER), str(root)) == "foreign"


def _checkpoint_table(text: str) -> dict[str, Any] | None:
    """None where there is no text, or one that was edited by hand, which is said where it is read."""
    try:
        table = tomllib.loads(text).get("checkpoint", {}) if text else None
    except ValueError:
        return None
    if not isinstance(table, dict):
        return None
    return table | {"folder": folder_of_kept(str(table.get("folder", "")), text)}
