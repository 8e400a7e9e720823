"""Shared by all tests: the rank server is told what to preload before anything starts it, and seeds are
fixed."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from fsdmoe.testing.ranks import PRELOAD

multiprocessing.set_forkserver_preload(PRELOAD)

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
