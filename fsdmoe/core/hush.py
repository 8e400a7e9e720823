"""Leaves out of a program's output what libraries say to each other and a user can do nothing about.

transformers imports torchao where that is installed, for models that need it or not, and torchao registers
enums in a way that torch 2.13 calls deprecated, and says of its kernels for GPUs that they cannot be loaded
where there is no GPU: lines that look like failures.
"""

from __future__ import annotations

import logging

_ENUMS = "is an Enum subclass"


def hush_libraries() -> None:
    """For this process, from now on. Programs call it; a loop of your own decides by itself."""
    for name, is_of_interest in (("torch.utils._pytree", _is_of_others), ("torchao", _is_for_this_machine)):
        logger = logging.getLogger(name)
        if is_of_interest not in logger.filters:
            logger.addFilter(is_of_interest)


def _is_of_others(record: logging.LogRecord) -> bool:
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (_ENUMS in str(record.msg) and getattr(first, "__module__", "").startswith("torchao."))


def _is_for_this_machine(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith("Failed to load "):
        return True
    import torch  # whoever says it has imported it

    return torch.cuda.is_available()
