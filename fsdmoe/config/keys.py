"""Every key of a configuration: its type, its default, and what is written about it below its field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, Union

from fsdmoe.config.schema import SECTIONS


class Key(NamedTuple):
    """One key."""

    name: str
    """Dotted, as it is written on the command line."""
    hint: Any
    """Its type."""
    default: Any
    text: str


@cache
def all_keys() -> tuple[Key, ...]:
    """In the order of a printed configuration."""
    return tuple(key for name, cls in SECTIONS.items() for key in _keys_of(cls, name))


def keys_with(word: str) -> list[Key]:
    """Those with the word in their name or, where there are none, in what is written about them."""
    named = [key for key in all_keys() if word in key.name]
    return named or [key for key in all_keys() if word in key.text.lower()]


def table_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` is, or that it is a union of with none."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((choice for choice in choices if dataclasses.is_dataclass(choice)), None)  # type: ignore[return-value]


def _keys_of(cls: type, above: str) -> Iterator[Key]:
    hints, texts = typing.get_type_hints(cls), _texts_of(cls)
    for field in dataclasses.fields(cls):
        name, inner = f"{above}.{field.name}", table_of(hints[field.name])
        if inner is None or field.default is None:
            yield Key(name, hints[field.name], field.default, texts.get(field.name, ""))
        if inner is not None:
            yield from _keys_of(inner, name)


def _texts_of(cls: type) -> dict[str, str]:
    """What stands below each field, in one line; fields may be those of a class above."""
    texts: dict[str, str] = {}
    for owner in [owner for owner in reversed(cls.__mro__) if dataclasses.is_dataclass(owner)]:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(found, ast.ClassDef)
        for field, below in zip(found.body, found.body[1:]):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign):
                texts[ast.unparse(field.target)] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    return texts
