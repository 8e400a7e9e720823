"""Attributes that have another value while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def set_for_a_while(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block ``owner`` has ``value`` as its attribute ``name``; afterwards what it had before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
