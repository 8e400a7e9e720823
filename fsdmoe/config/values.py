"""Values of a mapping or of command-line text to a frozen dataclass, strictly, with every finding
collected."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tomllib
import types
import typing
from typing import Any, Literal, TypeVar, Union

from fsdmoe.config.keys import all_keys, table_of
from fsdmoe.config.suggest import suggest
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import one_of

Problems = list[str]
T = TypeVar("T")
_SWITCHES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
"""What is written for true and false elsewhere."""


def build_section(cls: type[T], values: dict[str, Any], key: str, problems: Problems) -> T | None:
    """Build ``cls`` from TOML values, with the findings in ``problems``; ``None`` when that cannot be done.

    What comes back with findings is built from the values that are sound: fit for finding more, not for
    running."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    wrong: Problems = []
    arguments = {}
    renamed = former_names(cls)
    for written, value in values.items():
        name = renamed.get(written, written)
        if name != written and name in values:
            problems.append(f"{key}.{written}: is {key}.{name} now, which is set too; remove {written}")
            continue
        if name not in names:
            problems.append(f"{key}.{name}: unknown key; {suggest(f'{key}.{name}')}")
            continue
        found: Problems = []
        converted = _convert(value, hints[name], f"{key}.{name}", found)
        wrong += found
        if not found:
            arguments[name] = converted
    problems.extend(wrong)
    try:
        return cls(**arguments)
    except ConfigError as error:
        if not wrong:  # else a default that stands in for a wrong value may be to blame
            problems.extend(error.problems)
    except TypeError as error:
        problems.append(f"{key}: {error}; add the missing key")
    return None


def former_names(cls: type) -> dict[str, str]:
    """Names that keys of the section had before, which files may still use, with the names of today."""
    return {f.metadata["formerly"]: f.name for f in dataclasses.fields(cls) if "formerly" in f.metadata}


def parse_override(values: dict[str, Any], cls: type, key: str, text: str | None, problems: Problems) -> None:
    """Put the command-line ``text`` for the dotted ``key`` of section ``cls`` into ``values``, as TOML would
    hold it. ``None``: the key stood alone, which means true."""
    hint: Any = cls
    above, *written = key.split(".")
    path: list[str] = []
    former: dict[str, str] = {}
    for name in written:
        table = table_of(hint)
        if table is None:
            problems.append(f"{key}: unknown key; {above} has no keys of its own, write --{above} VALUE")
            return
        hints = typing.get_type_hints(table)
        former = former_names(table)
        name = former.get(name, name)
        if name not in hints:
            problems.append(f"{key}: unknown key; {suggest(key)}")
            return
        hint, above = hints[name], f"{above}.{name}"
        path.append(name)
    if text is None and hint is not bool:
        problems.append(f"{key}: expected a value after it, got none; write --{key} VALUE")
        return
    *path, last = path
    for name in path:
        inner = values.get(name)
        values[name] = {} if inner is None else inner
        if not isinstance(inner, dict | None):
            return  # not a table in the file: reported when the section is built
        values = values[name]
    for old in [old for old, new in former.items() if new == last]:
        values.pop(old, None)  # the file's, under the name that the key had before
    values[last] = True if text is None else _from_text(text, hint)


def _from_text(text: str, hint: Any) -> Any:
    """Text that may be a string is one; everything else is read as TOML would read it."""
    if text.lower() in ("none", "null") and type(None) in typing.get_args(hint):
        return None
    if _takes_string(hint):
        return text
    inner = _item_of(hint)
    if text.lower() in ("none", "null") and inner is not None:
        return []
    try:
        value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
        return value if inner is None or isinstance(value, list) else [value]
    except tomllib.TOMLDecodeError:
        if hint is float:  # .5 and 1. are numbers to everyone but TOML
            with contextlib.suppress(ValueError):
                return float(text)
        if inner is None:
            return text
        return [_from_text(item.strip(), inner) for item in text.split(",")] if text else []


def _takes_string(hint: Any) -> bool:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(_takes_string(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return isinstance(typing.get_args(hint)[0], str)
    return hint is str


def _item_of(hint: Any) -> Any:
    """The type of a list's items; none for what is no list."""
    lists = [choice for choice in (hint, *typing.get_args(hint)) if typing.get_origin(choice) is tuple]
    return typing.get_args(lists[0])[0] if lists else None


def _convert(value: Any, hint: Any, key: str, problems: Problems) -> Any:
    """``value`` as the annotation wants it; anything but a widening of int to float is a finding."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if isinstance(value, dict) and (table := table_of(hint)) is not None:
            return build_section(table, value, key, problems)
        if value == "none" and type(None) in choices:
            return None
        for choice in choices:
            tried: Problems = []
            converted = _convert(value, choice, key, tried)
            if not tried:
                return converted
        return _wrong(value, " or ".join(map(_name, choices)), key, problems, hint)
    if origin is Literal:
        section, _, name = key.rpartition(".")
        wrong = one_of(section, {name: value}, {name: choices})
        problems.extend(wrong)
        return None if wrong else value
    if origin is tuple:
        if value == "auto" and value in typing.get_args(choices[0]):  # one of the items that stands alone
            value = [value]
        if not isinstance(value, (list, tuple)):
            return _wrong(value, "a list", key, problems, hint)
        items = [choices[0]] * len(value) if choices[-1] is Ellipsis else list(choices)
        if len(items) != len(value):
            return _wrong(value, f"a list of {len(items)}", key, problems)
        return tuple(
            _convert(v, h, _item_key(key, i, h), problems) for i, (v, h) in enumerate(zip(value, items))
        )
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value  # a preset's
        if not isinstance(value, dict):
            return _wrong(value, "a table", key, problems, hint)
        return build_section(hint, value, key, problems)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (isinstance(value, hint) and not (hint is int and isinstance(value, bool))):
        return value
    return _wrong(value, _name(hint), key, problems)


def _item_key(key: str, number: int, hint: Any) -> str:
    """A table in a list is named by its place; of other items the message shows the value."""
    return key if table_of(hint) is None else f"{key}[{number}]"


def _name(hint: Any) -> str:
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        type(None): "none",
    }.get(hint, "a table" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint)))


def _wrong(value: Any, wanted: str, key: str, problems: Problems, hint: Any = None) -> None:
    fix = wanted
    if wanted.startswith("a whole number") and isinstance(value, float) and value.is_integer():
        fix = str(int(value))  # 1e3
    elif wanted == "true or false" and str(value).lower() in _SWITCHES:
        fix = _SWITCHES[str(value).lower()]
    elif (table := table_of(hint)) is not None:
        fix = _key_inside(value, table, key)
    elif (item := _item_of(hint)) is not None and wanted.startswith("a list"):
        fix = _list_of(value, item, key)
    elif wanted.startswith(("a number", "a whole number")):
        fix = (_number_meant(value, wanted) if isinstance(value, str) else None) or f"{wanted}{_unit(key)}"
    problems.append(f"{key}: expected {wanted}, got {value!r} ({type(value).__name__}); write {fix}")


def _key_inside(value: Any, table: type, key: str) -> str:
    """For a value where a table should be: the key in it that takes such a value, and its others."""
    hints = typing.get_type_hints(table)
    is_switch = isinstance(value, bool)  # asks for all of it, not for the first switch in it
    fit = [name for name, hint in hints.items() if _fits(value, hint) and not is_switch]
    first = fit[0] if fit else next(iter(hints))
    others = ", ".join(name for name in hints if name != first)
    return f"{key}.{first} = {json.dumps(value) if fit else 'VALUE'} (or another key of it: {others})"


def _fits(value: Any, hint: Any) -> bool:
    tried: Problems = []
    _convert(value, hint, "", tried)
    return not tried


_USUAL = {"memory.recompute": "layer"}
"""Of lists of choices, the one that most people want."""


def _list_of(value: Any, item: Any, key: str) -> str:
    """For one value where a list should be."""
    if value is False:
        return "[] for none"
    if typing.get_origin(item) is Literal:
        choices = typing.get_args(item)
        one = value if value in choices else _USUAL.get(key, choices[0])
        return f'["{one}"], or a list of others of {", ".join(choices)}'
    if table_of(item) is not None:
        return f"a table [[{key}]] for each"
    example = value if _fits(value, item) else {str: "TEXT", int: 0, float: 0.5}.get(item, "VALUE")
    return f"[{json.dumps(example)}]"


_UNITS = {"seconds": "seconds", "gib": "GiB", "bytes": "bytes"}


def _unit(key: str) -> str:
    """What a number counts, in brackets: by the end of its key, or by what is written about it."""
    unit = _UNITS.get(key.rpartition("_")[2])
    if unit is None:
        text = next((known.text for known in all_keys() if known.name == key), "")
        unit = re.split(r"[.;] |[.;]$", text)[0]
        unit = unit[:1].lower() + unit[1:] if unit[1:2].islower() else unit
    return f" ({unit})" if unit else ""


def _number_meant(text: str, wanted: str) -> str | None:
    """For a number in quotes, or with a comma in it."""
    is_whole = wanted.startswith("a whole number")
    plain = text.strip().replace(",", "" if is_whole else ".")
    try:
        _ = int(plain) if is_whole else float(plain)
    except ValueError:
        return None
    return f"{plain}, {'which has no comma' if ',' in text else 'without quotes'}"
