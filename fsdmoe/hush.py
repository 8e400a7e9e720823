"""Leaves out of a program's output what libraries say to each other and a user can do nothing about.

transformers imports torchao where that is installed, for models that need it or not, and torchao registers
enums in a way that torch 2.13 calls deprecated: two lines a rank, which look like failures.
"""

from __future__ import annotations

import logging

_ENUMS = "is an Enum subclass"


def hush_libraries() -> None:
    """For this process, from now on. Programs call it; a loop of your own decides by itself."""
    logger = logging.getLogger("torch.utils._pytree")
    if _is_of_interest not in logger.filters:
        logger.addFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (_ENUMS in str(record.msg) and getattr(first, "__module__", "").startswith("torchao."))
