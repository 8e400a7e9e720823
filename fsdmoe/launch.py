"""``fsdmoe train``: checks the configuration, starts the ranks as torchrun does, and says why a run ended.

torchrun's options go before or between those of ``train.py``. What torchrun prints about ranks that fail is
left out: a rank says its cause itself, and one that was killed left it in a file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from fsdmoe.config import CommandLine, load_config
from fsdmoe.config.command_line import CHECKED
from fsdmoe.config.host import num_gpus

_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--max-restarts",
)  # fmt: skip
_MEETING = ("--master-addr", "--rdzv-endpoint")
"""Without them all ranks are on this host."""


def run_rank(arguments: Sequence[str]) -> int:
    """One rank of a run, or the only one; returns the exit code."""
    return _train(load_config(arguments))


def launch(arguments: Sequence[str]) -> int:
    """A run with all its ranks on this host: as many as it has GPUs, or one; returns the exit code."""
    options, rest = split_options(arguments)
    num_ranks = options.setdefault("--nproc-per-node", str(max(1, num_gpus())))
    hosts = options.get("--nnodes", "1")
    if not (num_ranks.isdecimal() and hosts.isdecimal() and int(num_ranks) * int(hosts)):
        print(
            f"fsdmoe: --nproc-per-node: expected a number of ranks, got {num_ranks!r} on {hosts!r} hosts; "
            "write numbers above 0",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("LOCAL_WORLD_SIZE", num_ranks)  # what this host must hold
    command = load_config(rest, world_size=int(num_ranks) * int(hosts))
    if command.dry_run or command.world_size == 1:
        return _train(command)
    command.say_what_comes()
    return _start_ranks(options, rest)


def _train(command: CommandLine) -> int:
    command.say_what_comes()
    from fsdmoe.train import train  # not above: it loads torch, which takes seconds

    return shutdown(train(command))


def shutdown(code: int) -> int:
    """Destroy the process group when the run ended normally (NCCL warns otherwise) and return ``code``.

    After a failure it is kept: destroying it may wait for ranks that never join.
    """
    import torch.distributed as dist  # not above: a refused configuration ends before it is loaded

    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    return code


def _start_ranks(options: dict[str, str], arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    alone = [] if any(option in options for option in _MEETING) else ["--standalone"]
    given = [word for option in options.items() for word in option]
    os.environ[CHECKED] = "1"
    logging.disable(logging.ERROR)  # this process says one thing: the cause
    try:
        # what follows -- is not torchrun's: its parser would take --run for one of its own options
        run(parse_args([*alone, *given, "-m", "--", "fsdmoe", "train", *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            message: Any = failure.message  # as the error file holds it, or torch's own words
            print(f"fsdmoe: {message['message'] if isinstance(message, dict) else message}", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value
    return 0


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options by name, and all other arguments."""
    options: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        name = key.replace("_", "-")
        if name == "--standalone" and not equals:
            continue  # as it is without a meeting point
        if name in _OPTIONS and (equals or rest):
            options[name] = value if equals else rest.pop(0)
        else:
            others.append(key + equals + value)
    return options, others
