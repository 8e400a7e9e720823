"""``--help``: the usage and the sections; ``--help WORD``: one section, or the keys with that word."""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, Union

from fsdmoe.config.keys import Key, all_keys, keys_with
from fsdmoe.config.names_elsewhere import ALIASES
from fsdmoe.config.schema import SECTIONS
from fsdmoe.config.suggest import suggest

USAGE = """usage: torchrun [--nproc-per-node N] train.py [--config FILE.toml] [--section.key VALUE ...]
       fsdmoe train|check [--nproc-per-node N] [--config FILE.toml] [--section.key VALUE ...]

  --config FILE     TOML file with one table a section, or the name of a packaged one: --config quickstart
  --resume FOLDER   instead of --config: go on with the run of this folder, by the config.toml that it keeps;
                    with --evaluate-only evaluate it, on any number of ranks
  --section.key V   override one field, for example --mesh.ep 4 --train.steps 50
  --print-config    print the resulting configuration as TOML and exit
  --dry-run         plan memory and communication for this configuration, print them with all that a run
                    would be refused for, files included, and exit
  --files-elsewhere with --dry-run: data, weights and folders are on another machine; do not look for them
  --evaluate-only   load the model, print its loss on the held-out documents and exit
  --check-only      check the machines and exit, as `fsdmoe check` does; 1 where one is sick or slow
  --take-over       go on in a folder whose run.lock names a run elsewhere that you know has ended
  --world N         plan for N ranks (with --dry-run or --print-config)
  --gpu GPU         with --dry-run: plan for this GPU, by name (l40s) or memory in GB (48)
  --help            this text; --help model: the keys of a section; --help lr: keys with this word;
                    --help all: every key
"""
_WIDTH = 110


def help_text(word: str | None) -> str:
    """What ``--help`` prints, with the word behind it."""
    if word is None:
        lines = [f"  {name:<18}{_first_sentence(cls)}" for name, cls in SECTIONS.items()]
        return "\n".join([USAGE, "sections (--help SECTION for the keys of one):", *lines])
    if word == "all":
        return f"{USAGE}\n{_listed(all_keys())}"
    wanted = word.lower().lstrip("-").replace("-", "_")
    of_section = [key for key in all_keys() if key.name.startswith(f"{wanted}.")]
    if wanted in SECTIONS:
        return _listed(of_section)
    meant = ALIASES.get(wanted, "").partition(" ")[0]
    if found := [key for key in all_keys() if wanted in key.name or meant == key.name] or keys_with(wanted):
        return _listed(found)
    return f"no key has the word {word!r} in it; {suggest(wanted)}"


def _first_sentence(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _listed(keys: Iterable[Key]) -> str:
    return "\n".join(f"--{key.name} {_form(key.hint)}  ({shown(key.default)})\n{_text(key)}" for key in keys)


def _text(key: Key) -> str:
    return textwrap.fill(key.text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value)) or "[]"
    if isinstance(value, str):
        return value if value and value.isprintable() else json.dumps(value)
    return str(value).lower()


def _form(hint: Any) -> str:
    """What may be written for a type."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return "|".join("none" if choice is type(None) else _form(choice) for choice in choices)
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, choices))
    if typing.get_origin(hint) is tuple:
        one = _form(choices[0])
        return f"A,B,... of {one}" if "|" in one else f"{one},{one},..."
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}.get(hint, "TABLE")
