"""Configurations in files: what is read is a plain mapping, what is written reads back to the same."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from fsdmoe.config.schema import Config
from fsdmoe.config.values import Problems
from fsdmoe.core.rules import near_file

PACKAGED = Path(__file__).parents[1] / "configs"
"""In the repository a link to ``configs/``; a wheel has its files."""


def read_toml(path: str, problems: Problems) -> dict[str, Any]:
    """The file's tables; empty, with a finding, where it cannot be read.

    A name without ``.toml`` that is no file here is that of a packaged configuration: ``quickstart``.
    """
    file = Path(path)
    if is_packaged(path):
        return _read_packaged(PACKAGED / f"{path}.toml")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        files = sorted(PACKAGED.rglob("*.toml"), key=lambda file: (len(file.parts), file))
        names = [file.relative_to(PACKAGED).with_suffix("").as_posix() for file in files]
        fix = near_file(path) or f"give a file, or a packaged one by its name: {', '.join(names)}"
        problems.append(f"--config: no file at {path!r}; {fix}")
    except IsADirectoryError:
        inside = sorted(str(file) for file in Path(path).glob("*.toml"))
        fix = f"name a file in it: {', '.join(inside[:3])}" if inside else "name a .toml file"
        problems.append(f"--config: expected a file, got the folder {path!r}; {fix}")
    except OSError as error:
        problems.append(f"--config: cannot read {path!r} ({error.strerror}); check its permissions")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fix = _toml_fix(file, str(error))
        problems.append(f"--config: {path!r} is not readable as TOML: {error}; {fix}")
    return {}


def is_packaged(name: str) -> bool:
    """Whether this names a packaged configuration, and no file here."""
    return not Path(name).suffix and not os.path.isfile(name) and os.path.isfile(PACKAGED / f"{name}.toml")


def _toml_fix(file: Path, error: str) -> str:
    """What to do about the line that an error of ``tomllib`` names."""
    found = re.search(r"at line (\d+)", error)
    if other := _other_format(file):
        return f"it is {other}; write TOML: [section], and key = value below it (configs/quickstart.toml)"
    if found is None:
        return "correct that place"
    line = file.read_text(encoding="utf-8").splitlines()[int(found[1]) - 1].strip()
    if word := re.search(r"\b(True|False)\b", line):
        return f"write {word[1].lower()} in {line!r}"
    if re.search(r"\b(None|null)\b", line):
        return f'write "none" in {line!r}, or leave it out'
    return f"correct {line!r}"


def _other_format(file: Path) -> str:
    """What a file that is no TOML is instead, by its name or its first line."""
    known = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".py": "Python"}
    if file.suffix.lower() in known:
        return known[file.suffix.lower()]
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), "")
    if first.startswith("---") or re.match(r"[\w.-]+:(\s|$)", first):
        return "YAML"
    return "JSON" if first.startswith("{") else ""


def _read_packaged(file: Path) -> dict[str, Any]:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    folder = tables.get("model", {}).get("hf", "")
    if folder.startswith("configs/"):  # written for the repository's folder, which may not be here
        tables["model"]["hf"] = str(PACKAGED / folder.removeprefix("configs/"))
    return tables


def to_toml(config: Config) -> str:
    """The configuration as TOML that reads back to the same; a field that is none is written ``"none"``. Next
    to the folder of ``model.hf`` there is no preset."""
    import tomli_w  # here, because a run that prints no configuration needs none of it

    tables = _with_none_written(dataclasses.asdict(config))
    if config.model.hf is not None:
        del tables["model"]["preset"]
    return tomli_w.dumps(tables)


def _with_none_written(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: _with_none_written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_none_written(inner) for inner in value]
    return "none" if value is None else value
