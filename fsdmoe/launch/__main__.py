"""``fsdmoe launch --on slurm --nodes 4 --gpus-per-node 8 --config run.toml``: a job that trains on a cluster.

Checks the mesh against the nodes, writes the job's files into the folder that ``--write`` names, and submits
them with ``--submit``. What is not an option below goes to ``fsdmoe train``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdmoe.config import CommandLine, load_config
from fsdmoe.config.disk import disk_findings
from fsdmoe.config.toml import PACKAGED, is_packaged
from fsdmoe.errors import ConfigError
from fsdmoe.launch import kubernetes, ray_train, skypilot, slurm
from fsdmoe.launch.job import (
    CONFIG_FILE,
    DEFAULT_GPU,
    ClusterJob,
    mesh_warnings,
    path_warnings,
    require_mesh,
    storage_warnings,
    write_files,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the job is written (and submitted), 2 when it is refused, else what the submission returns."""
    options, others = parser().parse_known_args(arguments)
    rest = [
        part for word in others for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    try:
        job, command = read_job(options, rest)
        require_mesh(job, command.config)
        warnings = mesh_warnings(job, command, options.gpu)
        if options.on in _RUN_ELSEWHERE:
            warnings += storage_warnings(command.config, options.shared)
            warnings += path_warnings(command.config, brings_folder=options.on == "skypilot")
        else:  # whose nodes share this machine's disk, as a rule
            warnings += [f"here, {line}" for _, line in disk_findings(command.config, is_plan=True)]
        for line in warnings:
            print(f"fsdmoe: warning: {line}", file=sys.stderr)
        files, submission = _WRITERS[options.on](job, options)
    except ConfigError as error:
        print(*(f"fsdmoe: {line}" for line in error.problems), sep="\n", file=sys.stderr)
        return 2
    try:
        written = write_files(job, files)
    except OSError as error:
        fix = "name a folder that can be made here" + " and on the nodes" * (options.on not in _RUN_ELSEWHERE)
        print(f"fsdmoe: --write: cannot write {job.folder} ({error.strerror}); {fix}", file=sys.stderr)
        return 2
    words = [*submission, str(written[-1])]
    print(f"written: {', '.join(map(str, written))}")
    if not options.submit:
        print(f"submit it: {' '.join(words)}")
        return 0
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        print(f"fsdmoe: --submit: expected the program {words[0]!r}, which is not here", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The options; those of one engine are ignored by the others."""
    made = argparse.ArgumentParser(prog="fsdmoe launch", description=__doc__, allow_abbrev=False)
    made.add_argument("--on", required=True, choices=sorted(_WRITERS), help="what starts the job")
    made.add_argument("--nodes", required=True, help="how many; MIN:MAX goes on with fewer (mesh.elastic)")
    made.add_argument("--gpus-per-node", type=int, required=True, metavar="G", help="one rank each")
    made.add_argument("--cpu", action="store_true", help="ranks without GPUs: asks for nodes alone")
    made.add_argument("--gpu", help=f"its kind, for predictions and skypilot (default: {DEFAULT_GPU})")
    made.add_argument(
        "--write",
        metavar="FOLDER",
        help="where the files go: kubernetes and skypilot launch/NAME here (the file's name); slurm and ray, "
        "with their logs, the folder launch of train.output_dir",
    )
    made.add_argument("--submit", action="store_true", help="submit the job too")
    slurm_options = made.add_argument_group("slurm")
    slurm_options.add_argument("--time", default="24:00:00", help="limit of an attempt (default: 24:00:00)")
    slurm_options.add_argument("--lead", type=int, default=300, help="save so many seconds before it (300)")
    slurm_options.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other")
    others = made.add_argument_group("kubernetes and skypilot")
    others.add_argument("--image", default="", help="kubernetes: with fsdmoe in it")
    others.add_argument("--plain", action="store_true", help="kubernetes: an Indexed Job, without Kubeflow")
    others.add_argument("--shared", default="", metavar="NAME:FOLDER", help="a volume claim, or bucket")
    return made


def read_job(options: argparse.Namespace, rest: Sequence[str]) -> tuple[ClusterJob, CommandLine]:
    """The job, and its configuration as checked for all nodes.

    Raises:
        ConfigError: A number is none.
    """
    fewest, colon, most = options.nodes.partition(":")
    counts = [fewest, most if colon else fewest]
    if not all(number.isdecimal() and int(number) for number in counts) or options.gpus_per_node < 1:
        raise ConfigError(
            f"--nodes and --gpus-per-node: expected numbers above 0, or MIN:MAX nodes, got {options.nodes!r} "
            f"and {options.gpus_per_node}; write --nodes 4 --gpus-per-node 8"
        )
    own = [word for word in rest if word.partition("=")[0] in _SBATCH]
    if options.on == "slurm" and own:
        raise ConfigError(f"{own[0]}: an option of sbatch; write --sbatch={own[0]}=VALUE")
    if "--config" not in rest:
        raise ConfigError("--config: expected the file of a run, got none; write --config FILE.toml")
    world_size = int(counts[-1]) * options.gpus_per_node
    command = load_config([*rest, "--dry-run", "--files-elsewhere"], world_size)
    job = ClusterJob(
        config_name=Path(command.source).stem,
        min_nodes=int(counts[0]),
        nodes=int(counts[-1]),
        ranks_per_node=options.gpus_per_node,
        has_gpus=not options.cpu,
        arguments=tuple(rest),
        folder=Path(command.config.train.output_dir, "launch").expanduser().resolve(),
    )
    if options.write:
        job = replace(job, folder=Path(options.write).expanduser().resolve())
    elif options.on in _RUN_ELSEWHERE:
        job = replace(job, folder=Path("launch", job.name).resolve())
    return job, command


_SBATCH = (
    "--account", "--constraint", "--exclude", "--gres", "--mem", "--nodelist", "--partition", "--qos",
    "--reservation",
)  # fmt: skip
"""Options that people give to sbatch."""

Files = tuple[list[tuple[str, str]], list[str]]
"""Names and texts, and the command that submits the last of them."""


def _slurm(job: ClusterJob, options: argparse.Namespace) -> Files:
    text = slurm.script(
        job, limit=options.time, lead=options.lead, python=sys.executable, extra=options.sbatch
    )
    return [("job.sbatch", text)], ["sbatch"]


def _kubernetes(job: ClusterJob, options: argparse.Namespace) -> Files:
    if not options.image:
        raise ConfigError("--image: expected the container image of the job, got none; name one")
    job, text = _with_config_inside(job)
    given = {"image": options.image, "config": text, "claim": options.shared}
    if options.plain or job.is_elastic:
        objects = kubernetes.indexed_job(job, **given)
    else:
        objects = [kubernetes.train_job(job, **given)]
    whole = objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
    return [("job.json", json.dumps(whole, indent=2) + "\n")], ["kubectl", "apply", "-f"]


def _ray(job: ClusterJob, _: argparse.Namespace) -> Files:
    submission = ["ray", "job", "submit", "--working-dir", ".", "--", "python"]
    return [("ray_job.py", ray_train.script(job))], submission


def _skypilot(job: ClusterJob, options: argparse.Namespace) -> Files:
    job, config = _with_config_inside(job)
    text = skypilot.task(job, config=config, gpu=options.gpu or DEFAULT_GPU, bucket=options.shared)
    return [("task.yaml", text)], ["sky", "jobs", "launch", "--yes"]


def _with_config_inside(job: ClusterJob) -> tuple[ClusterJob, str]:
    """The job with its configuration where the job itself writes it, and the text of that file."""
    at = job.arguments.index("--config") + 1
    name = job.arguments[at]
    file = PACKAGED / f"{name}.toml" if is_packaged(name) else Path(name)
    inside = CONFIG_FILE.format(job.config_name)
    job = replace(job, arguments=(*job.arguments[:at], inside, *job.arguments[at + 1 :]))
    return job, file.read_text(encoding="utf-8")


_RUN_ELSEWHERE = ("kubernetes", "skypilot")
"""Their nodes share no disk with this machine: ``train.output_dir`` is a mount of theirs."""
_WRITERS = {"slurm": _slurm, "kubernetes": _kubernetes, "ray": _ray, "skypilot": _skypilot}

if __name__ == "__main__":
    sys.exit(main())
