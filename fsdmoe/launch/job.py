"""A run on a cluster: what every engine needs to know of it, and whether its mesh fits the nodes."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import iglob
from pathlib import Path, PurePosixPath
from posixpath import normpath

from fsdmoe.config import CommandLine, Config
from fsdmoe.config.checks import clone_problems
from fsdmoe.config.elastic import fit_mesh
from fsdmoe.config.toml import PACKAGED
from fsdmoe.core.rules import counted
from fsdmoe.data.config import keyed_sources
from fsdmoe.launch.ranks import problems_of_fewer

PORT = 29400
"""Where launchers meet, on a node that runs nothing else."""
CONFIG_FILE = "/tmp/{}.toml"
"""On a node that does not see this machine's files, by the name of the configuration."""
_NODE = 8
"""GPUs of the largest node whose NVLink ends with it; larger domains span nodes."""
_LONGEST_NAME = 40
"""Kubernetes gives the names of pods 63."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """One run, whatever starts it."""

    config_name: str
    """Of its file, without the ending."""
    min_nodes: int
    nodes: int
    ranks_per_node: int
    has_gpus: bool
    """False: ranks compute on CPUs, and only nodes are asked for."""
    arguments: tuple[str, ...]
    """For ``fsdmoe train``."""
    folder: Path
    """Of the job's files and logs."""

    @property
    def name(self) -> str:
        """As all engines take it: small letters, digits and dashes, a letter first, and short, since they
        append to it."""
        name = re.sub("[^a-z0-9]+", "-", self.config_name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST_NAME].strip("-")

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes."""
        return self.min_nodes < self.nodes

    def train(self, python: str, **options: str) -> str:
        """The shell line of one node's launcher. Values of ``options`` may name shell variables."""
        given = {"nproc_per_node": str(self.ranks_per_node)} | options
        words = [f"--{key.replace('_', '-')} {value}" for key, value in given.items()]
        return " ".join([python, "-m fsdmoe train", *words, shlex.join(self.arguments)])


def run_problems(job: ClusterJob, config: Config) -> list[str]:
    """Why a run could not go on after an interruption, or on fewer nodes; a line each."""
    problems = problems_of_fewer(config, range(job.min_nodes, job.nodes + 1), job.ranks_per_node)
    problems += _clone_problems(job, config)
    checkpoint = config.checkpoint
    if checkpoint.interval < 0:
        problems.append(
            f"checkpoint.interval: expected saves, from which a job resumes, got {checkpoint.interval}; set "
            "0 (at the end and on a signal) or more"
        )
    if checkpoint.load == "none":
        problems.append(
            'checkpoint.load: expected "latest", got "none": every start of the job would begin anew; drop it'
        )
    return problems


def _clone_problems(job: ClusterJob, config: Config) -> list[str]:
    """Why the run would refuse clones by flex, where its NVLink domains are nodes: at its start, which may be
    on any of these numbers of them."""
    if config.experts.flex.domain:  # the configuration's own checks have it
        return []
    for nodes in range(job.min_nodes, job.nodes + 1):
        num_ranks = nodes * job.ranks_per_node
        fitted = fit_mesh(config, num_ranks)
        found = clone_problems(fitted, num_ranks, job.ranks_per_node, key="--gpus-per-node")
        if found:
            fix = ", or set experts.flex.domain where NVLink joins several nodes"
            return [f"{line}{fix}" for _, line in found]
    return []


DEFAULT_GPU = "h100"


def mesh_warnings(job: ClusterJob, command: CommandLine, gpu_name: str | None) -> list[str]:
    """What exchanges activations beyond the NVLink of a node, with its predicted price. ``gpu_name``: where
    the user named it."""
    mesh = command.config.mesh
    per_node = job.ranks_per_node
    ranks = {"mesh.ep": mesh.ep * mesh.etp, "mesh.tp": mesh.tp * mesh.cp}
    if not job.has_gpus or max(ranks.values()) <= per_node:
        return []
    from fsdmoe.plan.hardware import gpu_named  # not above: plans load torch, which takes seconds
    from fsdmoe.plan.job import Job, Setting
    from fsdmoe.plan.step_time import estimate_time

    gpu = gpu_named((gpu_name or DEFAULT_GPU).lower())
    unless = "" if gpu_name else ", or name another GPU with --gpu"
    domain = gpu.domain if gpu.domain > _NODE else per_node
    setting = Setting.of(command.config, command.world_size)
    planned = Job.of(command.config)
    lines = []
    for key, size in ranks.items():
        if size > domain:
            here, inside = (
                estimate_time(planned, setting, replace(gpu, domain=each)).total for each in (domain, size)
            )
            lines.append(
                f"{key}: {size} ranks exchange activations in every layer, and NVLink joins {domain}: a step "
                f"is predicted to take {here:.2f} s on {gpu.name}, {inside:.2f} s inside of one domain; set "
                f"{key} so that it stays within {counted(domain, 'rank')}{unless}"
            )
    return lines


def storage_warnings(config: Config, shared: str) -> list[str]:
    """Where checkpoints would be lost with a node that has only ``shared`` (NAME:FOLDER) in common with
    others."""
    key = "checkpoint.folder" if config.checkpoint.folder else "train.output_dir"
    folder = config.checkpoint.folder.removeprefix("file://") or config.train.output_dir
    if "://" in folder:
        return []
    mount = shared.partition(":")[2]
    if not mount:
        return [
            "--shared: expected storage that outlives a node, got none: unless the run saves to such a place "
            "by itself, one that loses its nodes begins anew"
        ]
    if PurePosixPath(normpath(folder)).is_relative_to(normpath(mount)):
        return []
    return [
        f"{key}: expected a folder in {mount}, which --shared mounts, got {folder!r}: checkpoints would be "
        f"lost with a node; write --{key} {mount.rstrip('/')}/{PurePosixPath(folder).name}"
    ]


def path_warnings(config: Config, shared: str, *, brings_folder: bool) -> list[str]:
    """Paths that nodes will not find. A job that ``brings_folder`` has this one there, but for what git
    ignores, and ``shared`` (NAME:FOLDER); others start in a folder of their own image."""
    paths = {"model.hf": _as_in_the_file(config.model.hf or "")}
    paths |= {f"{key}.path": source.path for key, source in keyed_sources(config.data)}
    if config.data.tokenizer != "bytes":
        paths["data.tokenizer"] = config.data.tokenizer
    if config.checkpoint.load not in ("latest", "none"):
        paths["checkpoint.load"] = config.checkpoint.load
    paths = {key: path for key, path in paths.items() if path and "://" not in path}
    if brings_folder:
        mount = shared.partition(":")[2]
        missing = {key: why for key, path in paths.items() if (why := _why_not_sent(path, mount))}
        return [f"{key}: {paths[key]!r} {why}" for key, why in missing.items()]
    return [
        f"{key}: expected the path in the job's containers, got {path!r}, which is relative to the folder "
        f"that they start in; write /FOLDER/{path.removeprefix('./')}, where FOLDER is mounted there"
        for key, path in paths.items()
        if path[0] not in "/~"
    ]


def _as_in_the_file(folder: str) -> str:
    """A folder of a packaged configuration as its text has it, which a job takes along."""
    inside = Path(folder)
    return f"configs/{inside.relative_to(PACKAGED)}" if inside.is_relative_to(PACKAGED) else folder


def _why_not_sent(path: str, mount: str) -> str:
    """Why nodes do not have it that get this folder and the mount; empty where they do."""
    fix = f"or name one in {mount}, which --shared mounts" if mount else "or name one that --shared mounts"
    if mount and PurePosixPath(normpath(path)).is_relative_to(normpath(mount)):
        return ""
    if path[0] in "/~" or normpath(path).startswith(".."):
        return f"is outside of this folder, which alone travels with the job; put it here, {fix}"
    if _is_ignored(path):
        return f"is ignored by git, and does not travel with this folder; take it out of .gitignore, {fix}"
    if not any(iglob(path, recursive=True)):
        return f"is not in this folder, which travels with the job; put it here, {fix}"
    return ""


def _is_ignored(path: str) -> bool:
    """Whether git leaves it out; not where there is no git, or no repository."""
    command = ["git", "check-ignore", "-q", "--", path]
    try:
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def write_files(job: ClusterJob, files: Sequence[tuple[str, str]]) -> list[Path]:
    """The job's files, by name, in its folder."""
    job.folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files:
        path = job.folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
