"""The command line of ``train.py``: flags, dotted overrides, ``--help``, and how a refused configuration
ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fsdmoe.config.build import compose, override_problems
from fsdmoe.config.checks import asked, cross_problems
from fsdmoe.config.disk import disk_findings
from fsdmoe.config.elastic import fit_mesh
from fsdmoe.config.help import help_text
from fsdmoe.config.host import meeting_problems, memory_problems
from fsdmoe.config.kept import KEPT, open_run, origins_of, problems_of_shared_checkpoints
from fsdmoe.config.schema import Config
from fsdmoe.config.suggest import BARE, WITH_VALUE
from fsdmoe.config.toml import read_toml, to_toml
from fsdmoe.config.values import Problems
from fsdmoe.config.warnings import cpu_warnings, warnings_of
from fsdmoe.core import events
from fsdmoe.core.failures import own_rank, report_error
from fsdmoe.core.rules import unreachable
from fsdmoe.observe.console import suppress_broken_pipe


@dataclass(frozen=True)
class CommandLine:
    """The configuration, and what else the command line asked for."""

    config: Config
    """As it was written; an elastic mesh is yet to be fitted to the ranks (``fit_mesh``)."""
    dry_run: bool
    world_size: int
    evaluate_only: bool = False
    problems: tuple[str, ...] = ()
    """With --dry-run: what the run would be refused for on this host, a line each."""
    gpu: str | None = None
    """With --dry-run: the GPU to plan for, by name or memory."""
    take_over: bool = False
    check_only: bool = False
    resumes: bool = False
    """It goes on with a run that was named."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each value that is no default comes from, by dotted key."""
    source: str = "the defaults"
    """What was read: a file, or the folder of a run."""
    written: frozenset[str] = frozenset()
    """The dotted keys that the user wrote."""

    def say_what_comes(self) -> None:
        """On the first rank, at once: torch takes seconds to load."""
        if _speaks():
            ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
            what = "a plan for" if self.dry_run else "evaluation on" if self.evaluate_only else "a run on"
            what = "a check of" if self.check_only else what
            line = f"fsdmoe: {what} {ranks}, by {self.source}; loading torch"
            print(line, file=sys.stderr, flush=True)

    def warn_of_device(self, *, has_gpu: bool) -> None:
        """Name what was written and has no effect on this device."""
        if not has_gpu and not self.dry_run and own_rank() == 0:  # a launcher has not looked at devices
            _print_warnings(cpu_warnings(self.config, self.written))


CHECKED = "FSDMOE_CHECKED"
"""In the environment of ranks whose launcher has checked the configuration, and said what it found."""
_PROGRAMS = ("--dry-run", "--evaluate-only", "--check-only")
"""What ``train.py`` does instead of training."""


def load_config(argv: Sequence[str], world_size: int | None = None) -> CommandLine:
    """Parse the command line and check what it asks for, without torch; prints help, the configuration or all
    problems and exits where that was asked or due.

    Args:
        argv: The arguments.
        world_size: The number of ranks; else the launcher's environment says it.
    """
    try:
        return _load(argv, world_size)
    except OSError as error:  # pathlib's is_file() and the like, too, in a folder that may not be entered
        _exit_with([unreachable(error, written_in(argv))])


def written_in(argv: Sequence[str]) -> dict[str, Any]:
    """Everything that the user wrote: the tables of the file that is named, flags and overrides."""
    flags, overrides = split_arguments(argv, [])
    resuming = _run_flag(flags)
    file = f"{flags[resuming]}/{KEPT}" if resuming else flags.get("--config")
    return {**({} if file is None else read_toml(file, [])), **flags, **overrides}


def _load(argv: Sequence[str], world_size: int | None) -> CommandLine:
    for flag in ("--help", "-h"):
        if flag in argv:
            word = [*argv[argv.index(flag) + 1 :], None][0]
            _print_help(None if word in (*BARE, *WITH_VALUE) else word)
    problems: Problems = []
    flags, overrides = split_arguments(argv, problems)
    if world_size is None or "--world" in flags:
        world_size = _world_size(flags.get("--world"), problems)
    mapping, origins = _read(flags, overrides, problems)
    resuming = _run_flag(flags)
    if resuming and "--evaluate-only" in flags:
        mapping = _with_mesh_that_fits(mapping, overrides, world_size)
    is_plan = "--dry-run" in flags
    is_elsewhere = "--files-elsewhere" in flags
    name = Path(flags["--config"]).stem if "--config" in flags else ""
    config, wrong = compose(mapping, overrides, problems, needs_data=not is_elsewhere, name=name)
    fitted = fit_mesh(config, world_size)
    findings = cross_problems(fitted, world_size, is_here=not is_plan)
    if any(": unknown option; " in line for line in problems):
        # It may be what the number of ranks, or the mesh, was meant by.
        wrong |= {key for keys, _ in findings for key in keys if key.startswith("mesh.")}
    refused = [line for keys, line in findings if wrong.isdisjoint(keys)]
    if "--config" in flags and not (is_plan or "--evaluate-only" in flags):
        refused += problems_of_shared_checkpoints(Path(flags["--config"]), mapping, config)
    if resuming and any(line.startswith("mesh") for line in refused):
        problems += _other_ranks(resuming, flags[resuming], world_size)
    problems += refused
    if "--print-config" in flags:
        _print_config(config, problems)
    found: Problems = []
    if not is_elsewhere:  # a run that is refused already makes no folders
        writes = "--evaluate-only" not in flags
        findings = disk_findings(config, is_plan=is_plan, is_refused=bool(problems), writes=writes)
        found += [line for keys, line in findings if wrong.isdisjoint(keys)]
    if not is_plan and not problems and "--evaluate-only" not in flags:
        found += meeting_problems() or memory_problems(fitted, world_size)
    # What this machine's devices cannot do says nothing of the machine that is planned for. Told first: the
    # rest may be for nothing here.
    if not is_plan and "--evaluate-only" not in flags and config.train.graphs != "none":
        import torch  # the only one that knows of its devices

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        problems[:0] = [line for _, line in asked(config.train.require_device, device_type)]
    if problems or (found and not is_plan):
        _exit_with([*problems, *found])
    if not is_elsewhere and not found:
        _warn(warnings_of(config, evaluate_only="--evaluate-only" in flags))
    keys = {f"{name}.{key}" for name, table in mapping.items() for key in table}
    return CommandLine(
        config,
        is_plan,
        world_size,
        evaluate_only="--evaluate-only" in flags,
        problems=tuple(found),
        gpu=flags.get("--gpu"),
        take_over="--take-over" in flags,
        check_only="--check-only" in flags,
        resumes=bool(resuming),
        origins=origins_of(config, mapping, overrides, flags.get("--config", ""), kept=origins),
        source=flags.get("--config") or flags.get(resuming) or CommandLine.source,
        written=frozenset((keys if origins is None else origins.keys()) | overrides.keys()),
    )


def _read(
    flags: Mapping[str, str], overrides: Mapping[str, str | None], problems: Problems
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """The tables of the file or run that is named, and where a run's values come from. Exits where it cannot
    be read: all else would be said of the defaults."""
    unread: Problems = []
    mapping: dict[str, Any] = {}
    origins: dict[str, str] | None = None
    if "--config" in flags:
        mapping = read_toml(flags["--config"], unread)
    if resuming := _run_flag(flags):
        mapping, origins = open_run(flags[resuming], unread, flag=resuming)
    if unread:
        _exit_with([*problems, *unread, *override_problems(overrides)])
    return mapping, origins


def _speaks() -> bool:
    return own_rank() == 0 and CHECKED not in os.environ


def _warn(lines: Iterable[str]) -> None:
    if _speaks():
        _print_warnings(lines)


def _print_warnings(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"fsdmoe: warning: {line}", file=sys.stderr, flush=True)


def _with_mesh_that_fits(
    mapping: dict[str, Any], overrides: Mapping[str, str | None], world_size: int
) -> dict[str, Any]:
    """A run's tables, without its mesh where that is not for so many ranks: to evaluate, any will do."""
    problems: Problems = []
    config, _ = compose(mapping, overrides, problems, needs_data=False)
    if not cross_problems(config, world_size):
        return mapping
    if own_rank() == 0 and not problems:
        line = f"the mesh of the run is not for {world_size} ranks, which share all weights instead"
        print(f"fsdmoe: --evaluate-only: {line}", file=sys.stderr, flush=True)
    return {name: table for name, table in mapping.items() if name != "mesh"}


def _other_ranks(flag: str, folder: str, world_size: int) -> Problems:
    """What to say first where the mesh of a run is not for the ranks of this start."""
    before = [row["ranks"] for row in events.read(Path(folder).expanduser()) if "ranks" in row]
    if not before or before[-1] == world_size:
        return []
    return [
        f"{flag}: expected the {before[-1]} ranks of the run's last start, or a mesh for others, got "
        f"{world_size}; start {before[-1]} ranks in all (on one host: --nproc-per-node {before[-1]}), or "
        "change the mesh as below"
    ]


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
    flags: dict[str, str] = {}
    overrides: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--"):
            problems.append(_no_option(key))
            if key.startswith("-") and not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value
            continue
        if key in BARE:
            flags[key] = ""
            continue
        given: str | None = value
        if not equals:
            given = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if key not in WITH_VALUE:
            overrides[key[2:]] = given
        elif given is None:
            problems.append(f"{key}: expected a value after it, got none; write {key} VALUE")
        else:
            flags[key] = given
    if _run_flag(flags):
        _refuse_beside_run(flags, overrides, problems)
    if "--world" in flags and {"--print-config", "--dry-run"}.isdisjoint(flags):
        problems.append(
            "--world: only plans, got a run; add --dry-run, or start that many ranks with torchrun"
        )
    if "--gpu" in flags and "--dry-run" not in flags:
        problems.append("--gpu: only plans, got a run, which takes the GPUs that are here; add --dry-run")
    if "--files-elsewhere" in flags and "--dry-run" not in flags:
        problems.append("--files-elsewhere: only plans, got a run, which needs its files here; add --dry-run")
    if "--take-over" in flags and (without := [flag for flag in _PROGRAMS if flag in flags]):
        problems.append(
            f"--take-over: expected a run that trains, got {without[0]}, which takes no lock; drop it"
        )
    return flags, overrides


def _run_flag(flags: Mapping[str, str]) -> str:
    """How the user named the run to go on with; empty where there is none. Torchrun takes ``--run`` for an
    abbreviation of its own options, hence the second name."""
    return next((flag for flag in ("--run", "--resume") if flag in flags), "")


def _no_option(word: str) -> str:
    """What to do about a word where an option should be."""
    if word in ("-n", "-np"):
        return f"{word}: expected --nproc-per-node for the number of ranks, got another launcher's; write it"
    if word.startswith("-"):
        return f"{word}: expected two dashes before an option, got one; write -{word}"
    fix = f"write --config {word}" if word.endswith(".toml") else "see --help"
    return f"{word}: expected an option that starts with --, got a bare word; {fix}"


def _refuse_beside_run(
    flags: Mapping[str, str], overrides: Mapping[str, str | None], problems: Problems
) -> None:
    flag = _run_flag(flags)
    if "--config" in flags:
        problems.append(f"{flag}: expected no --config with it, a run has its own configuration; drop one")
    if "train.output_dir" in overrides:
        problems.append(
            f"{flag}: expected no --train.output_dir with it, the run goes on in its folder; for another run "
            f"of the same configuration write --config {flags[flag]}/{KEPT} --train.output_dir FOLDER"
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
    report_error("\nfsdmoe: ".join(problems))
    sys.exit(2)


def _print_help(word: str | None) -> NoReturn:
    if own_rank() == 0:
        with suppress_broken_pipe():
            print(help_text(word))
    sys.exit(0)
