"""The configuration that a run keeps in its folder: ``config.toml``, with all values as they were resolved.

``--config`` reads the file back to the same configuration. Comments at its top say what came from where::

    #   train.steps         command line
    #   model.preset        configs/quickstart.toml
    #   model.num_experts   preset "quickstart"
    #   experts.dispatcher  default; decided by "auto": local

One more line says what the run began with (:mod:`fsdmoe.config.first_start`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdmoe.config.build import compose
from fsdmoe.config.first_start import (
    folder_of_kept,
    line_to_keep,
    problems_of_another_start,
    start_to_go_on,
    working_directory_line,
)
from fsdmoe.config.schema import SECTIONS, Config, by_dotted_key
from fsdmoe.config.toml import read_toml, to_toml
from fsdmoe.config.values import Problems, former_names
from fsdmoe.core.rules import near_file
from fsdmoe.models.config import PRESETS

KEPT = "config.toml"
"""Its name in the folder of a run."""
COMMAND_LINE = "command line"
DEFAULT = "default"
DECIDED = '; decided by "auto": '

_TOP = """# The configuration of this run, as resolved at its last start; --config takes this file.
# Where its values come from; those that are not listed are defaults.
"""
_ORIGIN = re.compile(r"#   (\S+) +(\S.*)")


def origins_of(
    config: Config,
    mapping: Mapping[str, Any],
    overrides: Iterable[str],
    file: str,
    *,
    kept: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each value that is no default comes from, by dotted key.

    Args:
        config: What was made of all.
        mapping: The tables of the file.
        overrides: The keys of the command line.
        file: What to call the file.
        kept: For the tables of a run that goes on: where it has them from.
    """
    if kept is not None:
        return {**kept, **{_name_of_today(key): COMMAND_LINE for key in overrides}}
    written = {_name_of_today(key): file for key in by_dotted_key(dict(mapping))}
    written |= {_name_of_today(key): COMMAND_LINE for key in overrides}
    if config.model.hf is not None:
        written.pop("model.preset", None)  # of a file, in whose place the folder is
    values = by_dotted_key(dataclasses.asdict(config))
    defaults = by_dotted_key(dataclasses.asdict(Config()))
    from_preset = PRESETS.get(config.model.preset, {}) if config.model.hf is None else {}
    found: dict[str, str] = {}
    for key, value in values.items():
        section, name = key.split(".")[:2]
        # A table that is written none, or as one value, has no keys below it.
        above = [above for above in written if key == above or key.startswith(f"{above}.")]
        if above:
            found[key] = written[above[-1]]
        elif section == "model" and name in from_preset:
            found[key] = f'preset "{config.model.preset}"'
        elif value != defaults.get(key):
            found[key] = "model.hf" if config.model.hf is not None else "derived"
    return found


def _name_of_today(key: str) -> str:
    """A dotted key that may be written by the name it had before."""
    section, _, rest = key.partition(".")
    return f"{section}.{former_names(SECTIONS[section]).get(rest, rest)}" if section in SECTIONS else key


def kept_text(
    config: Config, origins: Mapping[str, str], decided: Mapping[str, Any], first_start: str = ""
) -> str:
    """The file's text.

    Args:
        config: The configuration.
        origins: As of :func:`origins_of`.
        decided: What was decided for keys that leave it open, by key.
        first_start: As of :func:`first_start_line`.
    """
    lines = dict(origins)
    for key, value in decided.items():
        lines[key] = f"{origins.get(key, DEFAULT)}{DECIDED}{value}"
    width = max(map(len, lines), default=0)
    # A file may be called anything; TOML's comments hold no control characters.
    texts = {key: re.sub(r"[\x00-\x1f\x7f]", " ", origin) for key, origin in lines.items()}
    listed = "".join(f"#   {key:<{width}}  {origin}\n" for key, origin in texts.items())
    return f"{_TOP}{listed}{first_start}{working_directory_line()}\n{to_toml(config)}"


def kept_origins(text: str) -> dict[str, str]:
    """What the comments of a kept file say, without what was decided at that start."""
    found = {key: origin.partition(DECIDED)[0] for key, origin in _origin_lines(text).items()}
    return {key: origin for key, origin in found.items() if origin != DEFAULT}


def kept_values(text: str) -> dict[str, Any]:
    """Every value of a kept file by dotted key, with what was decided at that start where it is left open."""
    values = by_dotted_key(tomllib.loads(text))
    for key, origin in _origin_lines(text).items():
        if decision := origin.partition(DECIDED)[2]:
            values[key] = f"{values.get(key)}: {decision}"
    return values


def _origin_lines(text: str) -> dict[str, str]:
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return {match[1]: match[2] for line in comments if (match := _ORIGIN.fullmatch(line))}


def read_kept(path: Path, problems: Problems) -> Config | None:
    """The configuration in a kept file, each section checked by itself; none, with findings, where it cannot
    be read, or not by this version."""
    mapping = read_toml(str(path), problems)
    config, _ = compose(mapping, {}, problems, needs_data=False)
    if problems:
        return None
    folder = folder_of_kept(config.checkpoint.folder, path.read_text(encoding="utf-8"))
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, folder=folder))


def open_run(
    folder: str, problems: Problems, *, flag: str = "--run"
) -> tuple[dict[str, Any], dict[str, str]]:
    """What to go on with a run by: its tables, and where their values come from. Empty, with a finding, where
    the folder has no kept configuration; it begins with ``flag``, as the user named the folder by it.

    The run goes on in this folder, wherever it was before, and from its own newest checkpoint, also if it was
    started from scratch or set back. A foreign checkpoint that it started from stays: it may have none of
    its own yet.
    """
    root = Path(folder).expanduser()
    if not root.exists():
        fix = near_file(folder.rstrip("/")) or "name one that is there"
        problems.append(f"{flag}: expected the folder of a run, got {folder!r}, which is not there; {fix}")
        return {}, {}
    if not (root / KEPT).is_file():
        problems.append(f"{flag}: expected the folder of a run, got {folder!r}, {_no_run(root, folder)}")
        return {}, {}
    mapping = read_toml(str(root / KEPT), problems)
    train, checkpoint = (mapping.setdefault(name, {}) for name in ("train", "checkpoint"))
    if not isinstance(train, dict) or not isinstance(checkpoint, dict):
        return mapping, {}  # edited by hand: reported when the sections are built
    train["output_dir"] = folder
    text = (root / KEPT).read_text(encoding="utf-8")
    checkpoint |= start_to_go_on(checkpoint, text, root)
    if isinstance(folder_there := checkpoint.get("folder"), str):
        checkpoint["folder"] = folder_of_kept(folder_there, text)
    return mapping, kept_origins(text)


def problems_of_shared_checkpoints(file: Path, mapping: Mapping[str, Any], config: Config) -> Problems:
    """Why a new run by the kept configuration of another one would go on with that one's checkpoints, and
    delete them as it saves its own."""
    folder, now = config.checkpoint.folder, Path(config.train.output_dir).expanduser()
    train, checkpoint = mapping.get("train"), mapping.get("checkpoint")
    if not folder or not isinstance(train, dict) or not isinstance(checkpoint, dict):
        return []
    other, held = train.get("output_dir", ""), checkpoint.get("folder", "")
    is_kept = file.read_text(encoding="utf-8").startswith(_TOP)
    is_its_own = now.resolve() == file.expanduser().resolve().parent
    if not is_kept or is_its_own or held != folder:
        return []
    return [
        f"checkpoint.folder: expected another one than {folder!r} for a new run in {now}, since the run "
        f"{other}, whose configuration this is, saves there; write --checkpoint.folder OTHER too, or go on "
        f"with that run by --resume {file.parent}"
    ]


def first_start_line(config: Config, *, has_checkpoints: bool) -> str:
    """What :func:`kept_text` keeps of the start that began the run; see :func:`line_to_keep`."""
    return line_to_keep(config, _text_before(config), has_checkpoints=has_checkpoints)


def start_problems(config: Config) -> list[str]:
    """Why a run that has begun cannot start from another checkpoint now; see
    :func:`problems_of_another_start`."""
    return problems_of_another_start(config, _text_before(config), _kept_file(config))


def _kept_file(config: Config) -> Path:
    return Path(config.train.output_dir).expanduser() / KEPT


def _text_before(config: Config) -> str:
    """The kept configuration of the last start; empty where there is none that can be read, as of a run of an
    early version."""
    try:
        return _kept_file(config).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _no_run(root: Path, folder: str) -> str:
    """What a folder without a kept configuration is instead, and what to do with it."""
    if root.is_file():
        return f"a file; name the folder of its run, or write --config {folder}"
    if (root / "config.json").is_file():
        return f"a model of Hugging Face; write --model.hf {folder} to train it"
    run = next((above for above in root.resolve().parents if (above / KEPT).is_file()), None)
    if run is not None:
        return f"which is inside of the run {run}; write --resume {run}"
    return (
        f"which has no {KEPT}; name another, or resume a run of an earlier version by --config FILE "
        f"--train.output_dir {folder}"
    )


def write_kept(folder: Path, text: str) -> None:
    """Whole or not at all: a run that is killed meanwhile leaves the file of the start before."""
    unfinished = folder / f"{KEPT}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / KEPT)
