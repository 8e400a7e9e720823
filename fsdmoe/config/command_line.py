"""The command line of ``train.py``: flags, dotted overrides, ``--help``, and how a refused configuration
ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from fsdmoe.config.build import compose
from fsdmoe.config.checks import asked, cross_problems
from fsdmoe.config.disk import disk_findings
from fsdmoe.config.kept import KEPT, open_run, origins_of
from fsdmoe.config.schema import Config
from fsdmoe.config.toml import read_toml, to_toml
from fsdmoe.config.values import Problems
from fsdmoe.config.warnings import warnings_of
from fsdmoe.data import DataConfig, SourceConfig
from fsdmoe.experts.config import CapacityConfig, ExpertsConfig
from fsdmoe.failures import own_rank, report_error
from fsdmoe.observe.console import suppress_broken_pipe


@dataclass(frozen=True)
class CommandLine:
    """The configuration, and what else the command line asked for."""

    config: Config
    dry_run: bool
    world_size: int
    evaluate_only: bool = False
    problems: tuple[str, ...] = ()
    """With --dry-run: what the run would be refused for on this host, a line each."""
    take_over: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each value that is no default comes from, by dotted key."""


_PROGRAMS = ("--dry-run", "--evaluate-only")
"""What ``train.py`` does instead of training."""

USAGE = """usage: torchrun [--nproc-per-node N] train.py [--config FILE.toml] [--section.key VALUE ...]

  --config FILE     TOML file with one table a section
  --run FOLDER      instead of --config: go on with the run of this folder, by the config.toml that it keeps;
                    with --evaluate-only evaluate it, on any number of ranks
  --section.key V   override one field, for example --mesh.ep 4 --train.steps 50
  --print-config    print the resulting configuration as TOML and exit
  --dry-run         plan memory and communication for this configuration, print them with all that a run
                    would be refused for, files included, and exit
  --files-elsewhere with --dry-run: data, weights and folders are on another machine; do not look for them
  --evaluate-only   load the model, print its loss on the held-out documents and exit
  --take-over       go on in a folder whose run.lock names a run elsewhere that you know has ended
  --world N         plan for N ranks (with --dry-run or --print-config)
  --help            this text and every field
"""


def load_config(argv: Sequence[str]) -> CommandLine:
    """Parse the command line; prints help, the configuration or all problems and exits where that was asked
    or due."""
    if "--help" in argv or "-h" in argv:
        _print_help()
    problems: Problems = []
    flags, overrides = split_arguments(argv, problems)
    world_size = _world_size(flags.get("--world"), problems)
    mapping = read_toml(flags["--config"], problems) if "--config" in flags else {}
    origins: dict[str, str] | None = None
    if "--run" in flags:
        mapping, origins = open_run(flags["--run"], problems)
    if "--run" in flags and "--evaluate-only" in flags:
        mapping = _with_mesh_that_fits(mapping, overrides, world_size)
    is_plan = "--dry-run" in flags
    is_elsewhere = "--files-elsewhere" in flags
    config, wrong = compose(mapping, overrides, problems, needs_data=not is_elsewhere)
    problems += [line for keys, line in cross_problems(config, world_size) if wrong.isdisjoint(keys)]
    if "--print-config" in flags:
        _print_config(config, problems)
    found: Problems = []
    if not is_elsewhere:  # a run that is refused already makes no folders
        findings = disk_findings(config, is_plan=is_plan or bool(problems))
        found += [line for keys, line in findings if wrong.isdisjoint(keys)]
    # What this machine's devices cannot do says nothing of the machine that is planned for.
    if not is_plan and not problems and "--evaluate-only" not in flags:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        found += [line for _, line in asked(config.train.require_device, device_type)]
    if problems or (found and not is_plan):
        _exit_with([*problems, *found])
    if own_rank() == 0 and not is_elsewhere and not found:
        keys = {f"{name}.{key}" for name, table in mapping.items() for key in table}
        written = (keys if origins is None else origins.keys()) | overrides.keys()
        for line in warnings_of(config, written, has_gpu=is_plan or torch.cuda.is_available()):
            print(f"fsdmoe: warning: {line}", file=sys.stderr, flush=True)
    return CommandLine(
        config,
        is_plan,
        world_size,
        evaluate_only="--evaluate-only" in flags,
        problems=tuple(found),
        take_over="--take-over" in flags,
        origins=origins_of(config, mapping, overrides, flags.get("--config", ""), kept=origins),
    )


def _with_mesh_that_fits(
    mapping: dict[str, Any], overrides: Mapping[str, str | None], world_size: int
) -> dict[str, Any]:
    """A run's tables, without its mesh where that is not for so many ranks: to evaluate, any will do."""
    problems: Problems = []
    config, _ = compose(mapping, overrides, problems, needs_data=False)
    if problems or not cross_problems(config, world_size):
        return mapping
    if own_rank() == 0:
        line = f"the mesh of the run is not for {world_size} ranks, which share all weights instead"
        print(f"fsdmoe: --evaluate-only: {line}", file=sys.stderr, flush=True)
    return {name: table for name, table in mapping.items() if name != "mesh"}


def _print_config(config: Config, problems: Problems) -> NoReturn:
    if problems:
        _exit_with(problems)
    if own_rank() == 0:
        with suppress_broken_pipe():
            print(to_toml(config), end="")
    sys.exit(0)


def split_arguments(argv: Sequence[str], problems: Problems) -> tuple[dict[str, str], dict[str, str | None]]:
    """Flags and dotted overrides, both ``--key value`` and ``--key=value``; a key without a value has
    none."""
    takes_value = {"--config", "--run", "--world"}
    bare = {"--print-config", *_PROGRAMS, "--files-elsewhere", "--take-over"}
    flags: dict[str, str] = {}
    overrides: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--"):
            problems.append(f"{key}: expected an option that starts with --, got a bare word; see --help")
            continue
        if key in bare:
            flags[key] = ""
            continue
        given: str | None = value
        if not equals:
            given = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if key not in takes_value:
            overrides[key[2:]] = given
        elif given is None:
            problems.append(f"{key}: expected a value after it, got none; write {key} VALUE")
        else:
            flags[key] = given
    if "--run" in flags:
        _refuse_beside_run(flags, overrides, problems)
    if "--world" in flags and {"--print-config", "--dry-run"}.isdisjoint(flags):
        problems.append(
            "--world: only plans, got a run; add --dry-run, or start that many ranks with torchrun"
        )
    if "--files-elsewhere" in flags and "--dry-run" not in flags:
        problems.append("--files-elsewhere: only plans, got a run, which needs its files here; add --dry-run")
    if "--take-over" in flags and (without := [flag for flag in _PROGRAMS if flag in flags]):
        problems.append(
            f"--take-over: expected a run that trains, got {without[0]}, which takes no lock; drop it"
        )
    return flags, overrides


def _refuse_beside_run(
    flags: Mapping[str, str], overrides: Mapping[str, str | None], problems: Problems
) -> None:
    if "--config" in flags:
        problems.append("--run: expected no --config with it, a run has its own configuration; drop one")
    if "train.output_dir" in overrides:
        problems.append(
            "--run: expected no --train.output_dir with it, the run goes on in its folder; for another run "
            f"of the same configuration write --config {flags['--run']}/{KEPT} --train.output_dir FOLDER"
        )


def _world_size(text: str | None, problems: Problems) -> int:
    name, fix = "--world", "write --world 64"
    if text is None:
        name, fix = "WORLD_SIZE", "unset it, or start with torchrun"
        text = os.environ.get(name, "1")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(f"{name}: expected a positive number of ranks, got {text!r}; {fix}")
    return 1


def _exit_with(problems: Problems) -> NoReturn:
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    report_error("\n".join([f"{count} in the configuration:", *(f"  {line}" for line in problems)]))
    sys.exit(2)


def _print_help() -> NoReturn:
    if own_rank() == 0:
        import tyro  # the help formatter serves nothing else, and importing it takes long

        plain = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
        shown = Config(  # a table that is none has no fields to document
            experts=ExpertsConfig(capacity=CapacityConfig()),
            data=DataConfig(sources=(SourceConfig(kind="python-stdlib"),)),
        )
        with suppress_broken_pipe():
            print(USAGE)
            tyro.cli(
                Config, default=shown, args=["--help"], prog="train.py", use_underscores=True, config=plain
            )
    sys.exit(0)
