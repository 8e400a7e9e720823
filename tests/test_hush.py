"""Torchao's enums and libraries for GPUs are not told about, everything else of the same loggers is."""

import logging

import pytest
import torch

from fsdmoe.hush import hush_libraries

LINE = "%s is an Enum subclass and is now natively supported by torch.compile"


def test_only_the_enums_of_torchao_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.utils._pytree")
    before = list(logger.filters)
    theirs = type("KernelPreference", (), {"__module__": "torchao.quantization.quantize_.common"})
    own = type("Choice", (), {"__module__": "my_script"})
    try:
        hush_libraries()
        hush_libraries()
        assert len(logger.filters) <= len(before) + 1
        for cls in (theirs, own):
            logger.warning(LINE, cls)
        logger.warning("another thing of %s", theirs)
    finally:
        logger.filters[:] = before
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("<class 'my_script.Choice'> is an Enum subclass")
    assert told[1].startswith("another thing of")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_library_for_gpus_is_missed_only_where_there_is_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    logger = logging.getLogger("torchao")
    before = list(logger.filters)
    try:
        hush_libraries()
        logger.warning("Failed to load torchao/_C_mxfp8.so: Could not load this library")
        logger.warning("another thing")
    finally:
        logger.filters[:] = before
    assert len(caplog.records) == 1 + has_gpu
