"""Scripts in processes of their own, forked from the rank server: what they import is there already, so that
a test which starts a program does not spend seconds on importing torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fsdmoe.testing import NO_GPU

ROOT = Path(__file__).parents[2]
IMPORTS_ROOT = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
"""For the environment of a program that starts in another folder."""
_SERVER = multiprocessing.get_context("forkserver")


class Program:
    """``python script arguments``, started in the repository's root."""

    def __init__(self, script: str, *arguments: str, environment: Mapping[str, str] = NO_GPU) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fsdmoe-program-")
        self.process = _SERVER.Process(
            target=_run,
            args=(str(ROOT / script), arguments, dict(os.environ | environment), self._folder.name, sys.path),
        )
        self.process.start()

    @property
    def stdout(self) -> str:
        return Path(self._folder.name, "1").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._folder.name, "2").read_text()

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit code."""
        self.process.join(timeout)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout:.0f} s\n{self.stdout}{self.stderr}"
        return code

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def run_program(script: str, *arguments: str, timeout: float = 300.0, **environment: str) -> Program:
    """The script once it has ended."""
    program = Program(script, *arguments, environment=NO_GPU | environment)
    try:
        program.wait(timeout)
    finally:
        program.kill()
    return program


@contextmanager
def started_ranks(world_size: int, script: str, *arguments: str) -> Iterator[list[Program]]:
    """As torchrun starts it: every rank is a client of a store outside of them, at a port that the
    system chose. Ranks that still run are killed in the end."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks: list[Program] = []
    try:
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Program(script, *arguments, environment=NO_GPU | common | own))
        yield ranks
    finally:
        for program in ranks:
            program.kill()


def _run(
    script: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str, path: list[str]
) -> None:
    for number in (1, 2):
        os.dup2(os.open(Path(folder, str(number)), os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:] = [str(Path(script).parent), *path]
    sys.argv = [script, *arguments]
    gc.freeze()
    gc.enable()
    runpy.run_path(script, run_name="__main__")
