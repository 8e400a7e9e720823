"""``fsdmoe launch --on slurm --nodes 4 --gpus-per-node 8 --config run.toml``: a job that trains on a cluster.

Checks the mesh against the nodes, writes the job's files into the folder that ``--write`` names, and submits
them with ``--submit``. What is not an option below goes to ``fsdmoe train``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdmoe.config import CommandLine, load_config
from fsdmoe.config.disk import disk_findings
from fsdmoe.config.kept import KEPT
from fsdmoe.config.toml import PACKAGED, is_packaged
from fsdmoe.launch import kubernetes, ray_train, skypilot, slurm
from fsdmoe.launch.job import (
    CONFIG_FILE,
    DEFAULT_GPU,
    ClusterJob,
    mesh_warnings,
    path_warnings,
    run_problems,
    storage_warnings,
    write_files,
)
from fsdmoe.launch.options import option_problems, parser, size_problems, word_problems


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the job is written (and submitted), 2 when it is refused, else what the submission returns."""
    options, others = parser().parse_known_args(arguments)
    rest = [
        part for word in others for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    unknown = word_problems(rest, options.on)
    problems = option_problems(options) + unknown
    _say(problems)
    if unknown or size_problems(options):  # without a configuration for so many ranks nothing else is known
        return 2
    command = load_config([*rest, "--dry-run", "--files-elsewhere"], _most_nodes(options) * _ranks(options))
    job = make_job(options, rest, command)
    of_run = run_problems(job, command.config)
    _say(of_run)
    if problems or of_run:
        return 2
    _say(f"warning: {line}" for line in _warnings(job, command, options))
    files, submission = _WRITERS[options.on](job, options)
    try:
        written = write_files(job, files)
    except OSError as error:
        fix = "name a folder that can be made here" + " and on the nodes" * (options.on not in _RUN_ELSEWHERE)
        _say([f"--write: cannot write {job.folder} ({error.strerror}); {fix}"])
        return 2
    words = [*submission, str(written[-1])]
    print(f"written: {', '.join(map(str, written))}")
    if not options.submit:
        print(f"submit it: {shlex.join(words)}")
        return 0
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        _say([f"--submit: expected the program {words[0]!r}, which is not here; submit where it is"])
        return 2


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"fsdmoe: {line}", file=sys.stderr, flush=True)


def _warnings(job: ClusterJob, command: CommandLine, options: argparse.Namespace) -> list[str]:
    found = mesh_warnings(job, command, options.gpu)
    if options.on in _RUN_ELSEWHERE:
        found += storage_warnings(command.config, options.shared)
        return found + path_warnings(command.config, options.shared, brings_folder=options.on == "skypilot")
    # Their nodes share this machine's disk, as a rule.
    return found + [f"here, {line}" for _, line in disk_findings(command.config, is_plan=True)]


def _most_nodes(options: argparse.Namespace) -> int:
    return int(options.nodes.rpartition(":")[2])


def _ranks(options: argparse.Namespace) -> int:
    return int(options.gpus_per_node)


def make_job(options: argparse.Namespace, rest: Sequence[str], command: CommandLine) -> ClusterJob:
    """The job of checked options, and of a configuration that was read for all its nodes."""
    file = Path(command.source)  # of a run that goes on: its folder says more than config.toml
    folder = Path(options.write or Path(command.config.train.output_dir, "launch"))
    job = ClusterJob(
        config_name=file.parent.name if file.name == KEPT and file.parent.name else file.stem,
        min_nodes=int(options.nodes.partition(":")[0]),
        nodes=_most_nodes(options),
        ranks_per_node=_ranks(options),
        has_gpus=not options.cpu,
        arguments=tuple(rest),
        folder=folder.expanduser().resolve(),
    )
    if not options.write and options.on in _RUN_ELSEWHERE:
        job = replace(job, folder=Path("launch", job.name).resolve())
    return job


Files = tuple[list[tuple[str, str]], list[str]]
"""Names and texts, and the command that submits the last of them."""


def _slurm(job: ClusterJob, options: argparse.Namespace) -> Files:
    text = slurm.script(
        job,
        limit=options.time or slurm.LIMIT,
        lead=int(options.lead or slurm.LEAD),
        python=sys.executable,
        extra=options.sbatch,
    )
    return [("job.sbatch", text)], ["sbatch"]


def _kubernetes(job: ClusterJob, options: argparse.Namespace) -> Files:
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
