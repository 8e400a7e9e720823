"""No garbage is collected while kernels are issued."""

from __future__ import annotations

import gc

import pytest

from fsdmoe.autograd import without_collections


def _fail() -> None:
    with without_collections():
        assert not gc.isenabled()
        raise RuntimeError


def test_nothing_is_collected_in_the_block_and_it_is_again_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        _fail()
    assert gc.isenabled()


def test_a_collector_that_somebody_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
