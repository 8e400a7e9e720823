"""Names that a package offers and imports when they are first used.

A package's ``__init__`` lists them as imports for type checkers, which are also what happens later::

    if TYPE_CHECKING:
        from fsdmoe.data.stream import build_data

    __getattr__ = lazy_names(__name__, __file__)

These names are its ``__all__`` too. So the sections of a configuration, which are declared next to the parts
that read them, are imported and checked without torch.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, whose ``__init__`` is ``file``."""

    def load(name: str) -> Any:
        if name == "__all__":
            return list(_imports(file))
        home = _imports(file).get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        is_module = home == package
        module = importlib.import_module(f"{home}.{name}" if is_module else home)
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load


@cache
def _imports(file: str) -> dict[str, str]:
    """Where each name that the file imports for type checkers comes from."""
    module = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = [node for block in module.body if isinstance(block, ast.If) for node in block.body]
    return {
        alias.asname or alias.name: node.module
        for node in found
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
