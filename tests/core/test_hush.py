"""Torchao's enums and libraries for GPUs are not told about, everything else of the same loggers is."""

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch

from fsdmoe.core.hush import hush_libraries

LINE = "%s is an Enum subclass and is now natively supported by torch.compile"


class Heard(logging.Handler):
    """What a logger lets through, also where it hands nothing on, as torch's once it has set them up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def heard(name: str) -> Iterator[tuple[logging.Logger, list[str]]]:
    """A logger, whose filters and level are its own again afterwards."""
    logger, handler = logging.getLogger(name), Heard()
    before, level = list(logger.filters), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # examples that ran in this process have raised it
    try:
        yield logger, handler.lines
    finally:
        logger.setLevel(level)
        logger.filters[:] = before
        logger.removeHandler(handler)


def test_only_the_enums_of_torchao_are_left_out() -> None:
    theirs = type("KernelPreference", (), {"__module__": "torchao.quantization.quantize_.common"})
    own = type("Choice", (), {"__module__": "my_script"})
    with heard("torch.utils._pytree") as (logger, told):
        before = len(logger.filters)
        hush_libraries()
        hush_libraries()
        assert len(logger.filters) <= before + 1
        for cls in (theirs, own):
            logger.warning(LINE, cls)
        logger.warning("another thing of %s", theirs)
    assert len(told) == 2
    assert told[0].startswith("<class 'my_script.Choice'> is an Enum subclass")
    assert told[1].startswith("another thing of")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_library_for_gpus_is_missed_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with heard("torchao") as (logger, told):
        hush_libraries()
        logger.warning("Failed to load torchao/_C_mxfp8.so: Could not load this library")
        logger.warning("another thing")
    assert len(told) == 1 + has_gpu
