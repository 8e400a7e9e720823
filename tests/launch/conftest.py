"""Shared by the tests of the launcher, which tells its ranks things by the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test's launcher says is unknown to other tests of this process."""
    with mock.patch.dict(os.environ):
        yield
