"""The libraries whose products a recipe may take instead of fsdmoe's, by their value of
``precision.backend``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from fsdmoe.kernels.architecture import Architecture
from fsdmoe.kernels.products import Products
from fsdmoe.kernels.te_products import INSTALL_TE, require_te, te_parts, te_products
from fsdmoe.kernels.torchao_products import INSTALL_TORCHAO, require_torchao, torchao_parts, torchao_products
from fsdmoe.precision.config import Part


class PartsOf(Protocol):
    def __call__(self, recipe: str, on: Architecture | None, *, emulate: bool = False) -> frozenset[Part]: ...


class Library(NamedTuple):
    """What it computes, and how to get it; nothing of it is imported before ``products``."""

    name: str
    """For messages."""
    install: str
    """How to get it, for messages."""
    parts: PartsOf
    """What it computes of a recipe on a GPU of this architecture (None: there is none), or emulates."""
    require: Callable[[], None]
    """Refuses it where it is not installed."""
    products: Callable[[str, Architecture | None], Products]


LibraryKey = Literal["torchao", "te"]
LIBRARIES: dict[LibraryKey, Library] = {
    "torchao": Library("torchao", INSTALL_TORCHAO, torchao_parts, require_torchao, torchao_products),
    "te": Library("Transformer Engine", INSTALL_TE, te_parts, require_te, te_products),
}
