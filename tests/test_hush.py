"""Torchao's enums are not told about, everything else of the same logger is."""

import logging

import pytest

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
