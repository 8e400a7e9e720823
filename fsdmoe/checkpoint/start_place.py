"""What a path in ``checkpoint.load`` is to the run that names it.

=========  ==========================================  ====================================================
place      names                                       once the run has checkpoints of its own
=========  ==========================================  ====================================================
latest     the word                                    it resumes its newest
none       the word                                    it begins anew (*)
own        the run's folder, or that of its            as latest
           checkpoints
set_back   something inside of the latter              it is set back to that (*)
foreign    anything else                               it resumes its newest: that start is over
=========  ==========================================  ====================================================

(*) Ranks that the same launch starts again go on with what it has saved (:mod:`fsdmoe.checkpoint.course`).
"""

from __future__ import annotations

import os
from typing import Literal

Place = Literal["latest", "none", "own", "set_back", "foreign"]


def place_of(load: str, folder: str, run: str) -> Place:
    """What ``load`` is to the run in the folder ``run`` with its checkpoints in ``folder``."""
    if load == "latest":
        return "latest"
    if load == "none":
        return "none"
    path, own = real_path(load), real_path(folder)
    if path in (own, real_path(run)):
        return "own"
    return "set_back" if path.startswith(f"{own.rstrip('/')}/") else "foreign"


def real_path(path: str) -> str:
    """One text for all names of a folder: from the root, without links. An address (``s3://…``) stays."""
    path = path.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))


def absolute_path(load: str) -> str:
    """What ``checkpoint.load`` or ``checkpoint.folder`` says, from the root. Words, addresses and an empty
    text stay."""
    path = load.removeprefix("file://")
    if load in ("", "latest", "none") or "://" in path:
        return load
    return os.path.abspath(os.path.expanduser(path))


def is_same_folder(one: str, other: str) -> bool:
    """Of two values of ``checkpoint.folder``, where an empty one is the run's own."""
    return bool(one) == bool(other) and real_path(one) == real_path(other)
