"""Shared by all tests: no GPU is seen but by tests of GPUs, the rank server is told what to preload before
anything starts it, and seeds are fixed."""

import atexit
import gc
import logging
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path

# Imports leave no garbage to look for, and what they make stays: a fifth of the time to collect the tests.
gc.disable()
atexit.register(gc.unfreeze)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Asked otherwise, an import that looks for a GPU would spoil it for the ranks that are forked afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Read with the first product on a GPU: without it, none is called deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "gpt_oss")
# What most cases import: seconds for every rank that has to do it by itself. What is missing is left out.
PRELOAD = [
    "pytest",
    "hypothesis",
    "train",
    "fsdmoe.checkpoint",
    "fsdmoe.observe.charts",
    "tests.support.fsdp_parity",
]
PRELOAD += ["torch.distributed.fsdp", "functorch.compile", "networkx"]
PRELOAD += [
    "fsdmoe.huggingface.causal_lm",
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# A busy machine must not decide: no example has a time to keep, and drawing them may take long.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdmoe")
    group.addoption(
        "--draw", type=int, metavar="N", help="N cases marked full, drawn at random, in that order"
    )
    group.addoption("--seed", type=int, default=0, metavar="S", help="of --draw: which cases, in which order")
    group.addoption("--pictures", metavar="FOLDER", help="tests in a browser leave their pictures there")


@pytest.hookimpl(trylast=True)  # whatever else orders tests has done so
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw cases, where that was asked for. What needs a GPU is not among them."""
    number: int | None = config.getoption("--draw")
    if number is None:
        return
    is_full = [item for item in items if item.get_closest_marker("full") and "_gpu.py" not in item.nodeid]
    drawn = random.Random(config.getoption("--seed")).sample(is_full, min(number, len(is_full)))
    chosen = set(drawn)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = drawn


def pytest_configure(config: pytest.Config) -> None:
    """Tests do the same on every machine: one that needs a GPU is in a file test_*_gpu.py, and where anything
    else was asked for as well, nobody sees a GPU. ``make test-gpu`` asks for these files alone."""
    if not all(Path(path.partition("::")[0]).name.endswith("_gpu.py") for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from fsdmoe.testing import ranks  # now, since its package looks for a GPU

    ranks.PRELOAD[:] = ["tests.support.no_collector", *ranks.PRELOAD, *PRELOAD]
    ranks.ENVIRONMENT.update(os.environ)
    multiprocessing.set_forkserver_preload(ranks.PRELOAD)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _as_the_module_found_it() -> Iterator[None]:
    """What programs that a test ran in this process leave: a group of one rank, a launcher's silence."""
    yield
    logging.disable(logging.NOTSET)
    if dist.is_initialized():
        dist.destroy_process_group()
