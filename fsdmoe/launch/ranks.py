"""``fsdmoe train``: checks the configuration, starts the ranks as torchrun does, and says why a run ended.

torchrun's options go before or between those of ``train.py``. What torchrun prints about ranks that fail is
left out: a rank says its cause itself, and one that was killed left it in a file.

With ``--nnodes MIN:MAX`` the run is elastic. From the loss of a node to the next step it takes, at most::

    1 s      its ranks see that their launcher is gone, or the others that a connection is closed
    1 s      these end, and their launchers see it
    5 s      the lost launcher's heartbeats expire       (concurrently with the two above)
    5 s      the last call of the rendezvous: nodes that come within it take part
    the rest is the start of Python and torch, and the load of the last checkpoint
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdmoe.config import CommandLine, Config, load_config
from fsdmoe.config.checks import Findings, mesh_problems
from fsdmoe.config.command_line import CHECKED
from fsdmoe.config.elastic import fit_mesh
from fsdmoe.config.host import is_taken, num_gpus
from fsdmoe.core.failures import TRY_AGAIN

_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval", "--start-method",
    "--event-log-handler", "--role", "--log-dir", "-r", "--redirects", "-t", "--tee", "--local-ranks-filter",
    "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--local-addr", "--logs-specs",
    "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
)  # fmt: skip
"""All options of torchrun that have a value."""
_SWITCHES = ("--virtual-local-rank",)
_MEETING = ("--master-addr", "--rdzv-endpoint")
"""Without them all ranks are on this host."""
_SECONDS_FOR_A_HOST = 600
"""How long torchrun waits for the other launchers, too."""
_BATCH = "train.global_batch_size"
_MOST_BATCHES = 8
"""How many times the run's own batch one is looked for that all numbers of hosts share."""
_ELASTIC = {"--rdzv-backend": "c10d", "--max-restarts": "1000"}
_ELASTIC_WAITS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
"""torchrun's own defaults add up to 45 s."""
_FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Ranks that are started again meet in a store of their own: in one that is kept, torch 2.13 hands them the
addresses of those before."""


def run_rank(arguments: Sequence[str]) -> int:
    """One rank of a run, or the only one; returns the exit code."""
    return _train(load_config(arguments))


def launch(arguments: Sequence[str]) -> int:
    """A run with the ranks of this host: as many as it has GPUs, or one; returns the exit code."""
    options, rest = split_options(arguments)
    num_ranks = options["--nproc-per-node"] = ranks_here(options.get("--nproc-per-node"))
    fewest, colon, most = options.get("--nnodes", "1").partition(":")
    hosts = [fewest, most] if colon else [fewest]
    if problems := option_problems(options):
        print(*(f"fsdmoe: {line}" for line in problems), sep="\n", file=sys.stderr)
        return 2
    os.environ.setdefault("LOCAL_WORLD_SIZE", num_ranks)  # what this host must hold
    command = load_config(rest, world_size=int(num_ranks) * int(hosts[-1]))
    if colon:
        found = problems_of_fewer(command.config, range(int(hosts[0]), int(hosts[-1]) + 1), int(num_ranks))
        if found:
            print(*(f"fsdmoe: {line}" for line in found), sep="\n", file=sys.stderr)
            return 2
        options = _ELASTIC | options
        options["--rdzv-conf"] = ",".join(filter(None, [_ELASTIC_WAITS, options.get("--rdzv-conf")]))
    elif command.dry_run or command.world_size == 1:
        return _train(command)
    if problems := meeting_problems(options, int(hosts[-1])):
        print(*(f"fsdmoe: {line}" for line in problems), sep="\n", file=sys.stderr)
        return 2
    command.say_what_comes()
    return _start_ranks(options, rest)


def ranks_here(written: str | None) -> str:
    """The number of ranks that ``--nproc-per-node`` asks for, where it is a word of torchrun's for one."""
    if written is None:
        return str(max(1, num_gpus()))
    if written == "gpu" or (written == "auto" and num_gpus()):
        return str(num_gpus()) if num_gpus() else written
    return str(os.cpu_count() or 1) if written in ("auto", "cpu") else written


def option_problems(options: Mapping[str, str]) -> list[str]:
    """Why no ranks can be started with these options; a line each."""
    ranks = options["--nproc-per-node"]
    if ranks == "gpu":
        return ["--nproc-per-node: expected a host with GPUs, got gpu where there is none; write a number"]
    if not _is_count(ranks):
        return [f"--nproc-per-node: expected a number above 0, gpu, cpu or auto, got {ranks!r}; write one"]
    return count_problems("--nnodes", options.get("--nnodes", "1"))


def count_problems(option: str, written: str) -> list[str]:
    """Why this is no number of hosts, and no MIN:MAX of them."""
    hosts = written.split(":")
    if len(hosts) <= 2 and all(map(_is_count, hosts)) and int(hosts[0]) <= int(hosts[-1]):
        return []
    fix = "write 2, or 1:2"
    if len(hosts) == 2 and all(map(_is_count, hosts)):
        fix = f"write {hosts[1]}:{hosts[0]}"
    return [
        f"{option}: expected a number above 0 or MIN:MAX, got {repr(written) if written else 'none'}; {fix}"
    ]


def _port_problems(port: str | None) -> list[str]:
    """Why the ranks of this host alone could not meet at the port that was written."""
    if port is None:
        return []
    if not port.isdecimal() or int(port) >= 2**16:
        return [f"--master-port: expected a number below 65536, got {port!r}; write one, or leave it out"]
    if is_taken(int(port)):
        line = f"--master-port: expected a free port, got {port}, which another program listens on; "
        return [f"{line}choose another, or leave it out, which finds one"]
    return []


def meeting_problems(options: Mapping[str, str], num_hosts: int) -> list[str]:
    """Why the launchers could not meet. Waits for a host that has no address yet, as torchrun would, since a
    cluster may be about to give it one; but says so."""
    option = next((option for option in _MEETING if option in options), None)
    if option is None:
        line = (
            f"--rdzv-endpoint: expected a host and port where {num_hosts} hosts meet, got none; write "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29400, alike on all of them"
        )
        return [line] if num_hosts > 1 else _port_problems(options.get("--master-port"))
    written = options[option]
    host = (written.rpartition(":")[0] if option == "--rdzv-endpoint" else "") or written
    said = ""
    for _ in range(_SECONDS_FOR_A_HOST):
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as error:
            if not said:
                said = f"{option}: expected a host that is known here, got {host!r} ({error.strerror}); "
                print(f"fsdmoe: {said}waiting for it: correct it if it is misspelt", file=sys.stderr)
            time.sleep(1)
        else:
            return []
    return [f"{said}name one that all hosts know"]


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def problems_of_fewer(config: Config, hosts: Iterable[int], ranks_per_host: int) -> list[str]:
    """Why an elastic run could not go on with one of these numbers of hosts; a line each."""
    numbers = list(hosts)
    found = []
    for number in numbers:
        if problems := _problems_of(config, number * ranks_per_host):
            keys, line = problems[0]
            fix = ""
            if _BATCH in keys and (batch := _batch_for_all(config, numbers, ranks_per_host)):
                fix = f"; {batch} is one for each number of hosts"
            elif not config.mesh.elastic:
                fix = "; or set mesh.elastic = true, to take degrees that fit"
            found.append(f"--nnodes (--nodes): with {number} hosts of {ranks_per_host} ranks: {line}{fix}")
    return found


def _problems_of(config: Config, world_size: int) -> Findings:
    return mesh_problems(fit_mesh(config, world_size), world_size)


def _batch_for_all(config: Config, numbers: list[int], ranks_per_host: int) -> int | None:
    """The smallest global batch, from the run's own on, that each of these numbers of hosts can share."""
    own = config.train.global_batch_size
    for batch in range(own, _MOST_BATCHES * own + 1):
        tried = replace(config, train=replace(config.train, global_batch_size=batch))
        if not any(_problems_of(tried, number * ranks_per_host) for number in numbers):
            return batch
    return None


def _train(command: CommandLine) -> int:
    command.say_what_comes()
    from fsdmoe.train import train  # not above: it loads torch, which takes seconds

    return shutdown(train(command))


def shutdown(code: int) -> int:
    """Destroy the process group when the run ended normally (NCCL warns otherwise) and return ``code``.

    After a failure it is kept: destroying it may wait for ranks that never join.
    """
    import torch.distributed as dist  # not above: a refused configuration ends before it is loaded

    if dist.is_initialized() and (code == 0 or (code > 128 and dist.get_world_size() == 1)):
        dist.destroy_process_group()
    return code


def _start_ranks(options: dict[str, str], arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # With --standalone torchrun would pass over the port.
    alone = [] if any(option in options for option in (*_MEETING, "--master-port")) else ["--standalone"]
    given = [word for option in options.items() for word in option if word]
    os.environ[CHECKED] = "1"
    if options.get("--max-restarts", "0") != "0":
        os.environ.setdefault(_FRESH_STORE, "1")
    logging.disable(logging.ERROR)  # this process says one thing: the cause
    try:
        # what follows -- is not torchrun's: its parser would take --run for one of its own options
        run(parse_args([*alone, *given, "-m", "--", "fsdmoe", "train", *arguments]))
    except ChildFailedError as error:
        if any(failure.exitcode == TRY_AGAIN for failure in error.failures.values()):
            # Its cause is said. A rank that is stopped, for which the others ended, is killed by torchrun in
            # the end, and would come first: its error file was written at the start.
            return TRY_AGAIN
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
        if name in _SWITCHES and not equals:
            options[name] = ""
            continue
        if name in _OPTIONS and (equals or rest):
            options[name] = value if equals else rest.pop(0)
        else:
            others.append(key + equals + value)
    return options, others
