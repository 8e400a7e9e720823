"""The options of ``fsdmoe launch``, and what is wrong with them: all of it at once.

Engines take some of them as they are written, and refuse a bad one hours later, in a queue, or never.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches

from fsdmoe.config.checks import asked
from fsdmoe.config.kept import KEPT
from fsdmoe.config.suggest import FLAGS
from fsdmoe.core.rules import nearest
from fsdmoe.launch import slurm
from fsdmoe.launch.job import DEFAULT_GPU
from fsdmoe.launch.ranks import count_problems

ENGINES = ("kubernetes", "ray", "skypilot", "slurm")
_ENGINES_WITH = {
    "time": ("slurm",),
    "lead": ("slurm",),
    "sbatch": ("slurm",),
    "image": ("kubernetes",),
    "plain": ("kubernetes",),
    "shared": ("kubernetes", "skypilot"),
}
"""By option, the engines that have it; all of them have the others."""
_SBATCH = (
    "--account", "--constraint", "--exclude", "--gres", "--mem", "--nodelist", "--partition", "--qos",
    "--reservation",
)  # fmt: skip
"""Options that people give to sbatch."""
_LONG_NAMES = {
    "-A": "--account",
    "-C": "--constraint",
    "-J": "--job-name",
    "-N": "--nodes",
    "-k": "--no-kill",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-s": "--oversubscribe",
    "-t": "--time",
    "-w": "--nodelist",
    "-x": "--exclude",
}
"""Options of sbatch by their short names."""
_ONE_LAUNCHER = "drop it: each node has one task, its launcher, which starts --gpus-per-node ranks"
_REQUEUED = "drop it: the job is requeued until its run has ended"
_WHOLE_NODES = "drop it: the job has whole nodes"
_SCRIPT_OPTIONS = {
    "--job-name": "rename the file of the configuration, whose name the job has",
    "--nodes": "write --nodes",
    "--ntasks": _ONE_LAUNCHER,
    "--ntasks-per-node": _ONE_LAUNCHER,
    "--ntasks-per-gpu": _ONE_LAUNCHER,
    "--gpus-per-node": "write --gpus-per-node",
    "--exclusive": _WHOLE_NODES,
    "--oversubscribe": _WHOLE_NODES,
    "--no-kill": "write --nodes MIN:MAX, with which a job outlives its nodes",
    "--time": "write --time",
    "--requeue": _REQUEUED,
    "--no-requeue": _REQUEUED,
    "--open-mode": "drop it: attempts append to one log",
    "--output": "write --write FOLDER, which has the logs too",
    "--signal": "write --lead",
}
"""Options of sbatch that the script has, and those that would undo them; each with the fix."""
_FREE_WITHOUT_GPUS = ("--exclusive", "--oversubscribe")
"""Those that the script of ``--cpu`` does not have."""
_PLANS = "drop it: the job has --nodes, and is not submitted without --submit; to plan, fsdmoe train"
_BY_HAND = "drop it: a job is resumed until its run has ended; run fsdmoe train with it by hand"
_NO_RUN = {
    "--dry-run": _PLANS,
    "--files-elsewhere": _PLANS,
    "--print-config": _PLANS,
    "--world": _PLANS,
    "--check-only": _BY_HAND,
    "--evaluate-only": _BY_HAND,
}
"""Flags of ``train.py`` that start no run, or none to resume; each with the fix."""
_IMAGE = re.compile(
    r"(?:[\w.-]+(?::\d+)?/)?[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_STORAGE = {
    "kubernetes": (
        "a volume claim (small letters, digits, - and .)",
        r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?",
    ),
    "skypilot": (
        "a bucket (3 to 63 small letters, digits, -, _ and .)",
        r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]",
    ),
}
"""What ``--shared`` names, and how such a name looks."""
_LEADS = range(1, 2**16)
"""Seconds that Slurm takes."""
_EARLY = 60
"""Seconds by which Slurm may send a signal too soon."""


def parser() -> argparse.ArgumentParser:
    """The options. Nothing is checked here: argparse would say one thing at a time."""
    made = argparse.ArgumentParser(
        prog="fsdmoe launch",
        description="Checks a run's mesh against the nodes of a cluster, and writes and submits its job. "
        "What is not an option below goes to fsdmoe train.",
        allow_abbrev=False,
    )
    made.add_argument("--on", default="", metavar="ENGINE", help=f"what starts the job: {', '.join(ENGINES)}")
    made.add_argument("--nodes", default="", help="how many; MIN:MAX goes on with fewer, not with skypilot")
    made.add_argument("--gpus-per-node", default="", metavar="G", help="one rank each")
    made.add_argument("--cpu", action="store_true", help="ranks without GPUs: asks for nodes alone")
    made.add_argument(
        "--gpu",
        help=f"its kind, for predictions and skypilot: a name of fsdmoe plan (default: {DEFAULT_GPU})",
    )
    made.add_argument(
        "--write",
        metavar="FOLDER",
        help="where the files go: kubernetes and skypilot launch/NAME here (the file's name); slurm and ray, "
        "with their logs, the folder launch of train.output_dir",
    )
    made.add_argument("--submit", action="store_true", help="submit the job too")
    slurm_options = made.add_argument_group("slurm")
    slurm_options.add_argument("--time", help=f"limit of an attempt (default: {slurm.LIMIT})")
    slurm_options.add_argument("--lead", help=f"save so many seconds before it (default: {slurm.LEAD})")
    slurm_options.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other")
    others = made.add_argument_group("kubernetes and skypilot")
    others.add_argument("--image", default="", help="kubernetes: with fsdmoe in it")
    others.add_argument("--plain", action="store_true", help="kubernetes: an Indexed Job, without Kubeflow")
    others.add_argument("--shared", default="", metavar="NAME:/FOLDER", help="a volume claim, or bucket")
    return made


def option_problems(options: argparse.Namespace) -> list[str]:
    """What is wrong with the options, a line each."""
    problems = size_problems(options)
    defaults = parser()
    if options.on not in ENGINES:
        fix = nearest(options.on, ENGINES) if options.on else "choose one"
        got = repr(options.on) if options.on else "none"
        line = f"--on: expected one of {', '.join(ENGINES)}, got {got}; {fix}"
        return [line, *problems, *_gpu_problems(options.gpu)]
    problems += [
        f"--{name}: expected --on {' or '.join(engines)} with it, got {options.on}; drop it"
        for name, engines in _ENGINES_WITH.items()
        if getattr(options, name) != defaults.get_default(name) and options.on not in engines
    ]
    if options.on == "skypilot" and ":" in options.nodes and not problems:
        problems += _fixed_size_problems(options.nodes)
    problems += _gpu_problems(options.gpu)
    if options.on == "slurm":
        problems += _time_problems(options) + _sbatch_problems(options.sbatch, has_gpus=not options.cpu)
    if options.on == "kubernetes":
        problems += _image_problems(options.image)
    if options.shared and options.on in _STORAGE:
        problems += _shared_problems(options.shared, *_STORAGE[options.on])
    return problems


def size_problems(options: argparse.Namespace) -> list[str]:
    """Why this is no number of ranks."""
    problems = count_problems("--nodes", options.nodes)
    ranks = options.gpus_per_node
    if not ranks.isdecimal() or not int(ranks):
        problems.append(
            f"--gpus-per-node: expected a number above 0, got {repr(ranks) if ranks else 'none'}; write 8"
        )
    return problems


def word_problems(words: Sequence[str], engine: str) -> list[str]:
    """Words that neither the job nor its run can have, though one of them has the like."""
    problems = []
    own = [f"--{name.replace('_', '-')}" for name in vars(parser().parse_args([]))]
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    for name in names:
        if engine == "slurm" and (option := _LONG_NAMES.get(name, name)) in _SBATCH:
            problems.append(f"{name}: an option of sbatch; write --sbatch={option}=VALUE")
        elif name in _NO_RUN:
            problems.append(f"{name}: expected options of a run, got one that starts none; {_NO_RUN[name]}")
        elif name.startswith("--") and name not in FLAGS and "." not in name:
            longer = [option for option in own if option.startswith(f"{name}-")]
            if close := longer or get_close_matches(name, own, 1, 0.75):
                problems.append(f"{name}: not an option; did you mean {close[0]}?")
    return problems + _config_problems(words, names)


def _config_problems(words: Sequence[str], names: Sequence[str]) -> list[str]:
    resumed = next((flag for flag in ("--resume", "--run") if flag in names), "")
    if resumed:
        at = [word.partition("=")[0] for word in words].index(resumed)
        folder = words[at].partition("=")[2] or next(iter(words[at + 1 :]), "RUN")
        line = f"{resumed}: expected --config, since jobs always resume the run in train.output_dir; "
        return [f"{line}write --config {folder.rstrip('/')}/{KEPT}"]
    if "--config" not in words:
        return ["--config: expected the file of a run, got none; write --config FILE.toml"]
    return []


def _fixed_size_problems(nodes: str) -> list[str]:
    fewest, _, most = nodes.partition(":")
    if int(fewest) == int(most):
        return []
    line = f"--nodes: expected one number with --on skypilot, whose tasks have a fixed one, got {nodes!r}; "
    return [f"{line}write --nodes {most}, or choose another engine, which goes on with fewer"]


def _gpu_problems(gpu: str | None) -> list[str]:
    if gpu is None:
        return []
    from fsdmoe.plan.hardware import gpu_named  # not above: plans load torch, which takes seconds

    return [line for _, line in asked(gpu_named, gpu.lower())]


def _time_problems(options: argparse.Namespace) -> list[str]:
    limit = slurm.LIMIT if options.time is None else options.time
    lead = str(slurm.LEAD) if options.lead is None else options.lead
    problems = []
    seconds = slurm.seconds(limit)
    if seconds is None:
        line = f"--time: expected a limit as sbatch takes it, got {limit!r}; "
        problems.append(f"{line}write minutes (90), HH:MM:SS or D-HH:MM:SS")
    if not lead.isdecimal() or int(lead) not in _LEADS:
        problems.append(
            f"--lead: expected seconds from {_LEADS.start} to {_LEADS.stop - 1}, got {lead!r}; write 300"
        )
    elif seconds is not None and int(lead) + _EARLY >= seconds:
        problems.append(
            f"--lead: expected more than {_EARLY} seconds of --time {limit} before it, got {lead} of the "
            f"{seconds:.0f}: every attempt would stop as it begins; lower it, or raise --time"
        )
    return problems


def _sbatch_problems(given: Sequence[str], *, has_gpus: bool) -> list[str]:
    problems = []
    for option in given:
        if not re.fullmatch("--?[a-zA-Z].*", option):
            fix = f"write --sbatch=--{option.lstrip('-').splitlines()[0] if option.strip('-') else 'OPTION'}"
            problems.append(f"--sbatch: expected an option of sbatch, got {option!r}; {fix}")
        for name in _names_for_sbatch(option):
            if name in _SCRIPT_OPTIONS and (has_gpus or name not in _FREE_WITHOUT_GPUS):
                problems.append(
                    f"--sbatch: expected options that the script does not have, got {option!r}; "
                    f"{_SCRIPT_OPTIONS[name]}"
                )
    return problems


def _names_for_sbatch(line: str) -> list[str]:
    """The long names of the options on a line for sbatch, which may hold several. A short option's value may
    follow without a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that nothing closes
        words = line.split()
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    return [name if name.startswith("--") else _LONG_NAMES.get(name[:2], name) for name in names]


def _image_problems(image: str) -> list[str]:
    if not image:
        return ["--image: expected the container image of the job, got none; name one"]
    if not _IMAGE.fullmatch(image):
        fix = "write it as docker pull takes it, in small letters, without https://"
        return [f"--image: expected a name such as ghcr.io/me/fsdmoe:1, got {image!r}; {fix}"]
    return []


def _shared_problems(shared: str, what: str, pattern: str) -> list[str]:
    name, _, folder = shared.partition(":")
    is_address = folder.startswith("//")
    if re.fullmatch(pattern, name) and re.fullmatch("/[^:]*[^:/][^:]*", folder) and not is_address:
        return []
    meant = re.sub("[^a-z0-9._-]+", "-", name.lower()).strip("-._").replace("_", "-")
    fix = f"write {meant or 'NAME'}:/{folder.strip('/') or 'shared'}"
    if is_address or ":" in folder:
        without = f", without {name}://" * is_address
        fix = f"write its name alone before the colon{without}, as in data:/shared"
    line = (
        f"--shared: expected NAME:/FOLDER, {what} and an absolute folder of the nodes, got {shared!r}; {fix}"
    )
    return [line]
