"""A Slurm job: an sbatch script that saves ahead of its time limit, requeues itself, and goes on with the
nodes that are there."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fsdmoe.launch.job import ClusterJob

LIMIT = "24:00:00"
"""Of an attempt."""
LEAD = 300
"""Seconds before it at which a run is told to save."""

_SCRIPT = """\
#!/bin/bash
# Written by fsdmoe launch. Submit it: sbatch {path}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --time={limit}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/slurm-%j.log
# So many seconds before the limit every launcher gets SIGTERM: the run ends its step, saves and ends.
#SBATCH --signal=TERM@{lead}
{extra}
cd {here} || exit 2
attempt=${{SLURM_RESTART_COUNT:-0}}
logs={folder}/$SLURM_JOB_ID.$attempt
mkdir -p "$logs"
echo "attempt $attempt on $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST); logs in $logs"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={lead}  # ranks may save until the limit; torch 2.11 allows 30 s

# This script runs on the first node. Launchers meet in a process of its own, so that any of them may be lost.
port=$((20000 + SLURM_JOB_ID % 10000))
{python} -m fsdmoe.launch.store --port "$port" > "$logs/store.log" 2>&1 &
store=$!
srun --kill-on-bad-exit=0{no_kill} --output="$logs/node-%n.log" \\
    {train}
code=$?
kill "$store"

# 143: stopped by SIGTERM, and saved. A job that was cancelled is no longer running, and is left alone.
if [ "$code" = 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def seconds(limit: str) -> float | None:
    """Of a limit as Slurm reads it, where 0 is no limit: minutes[:seconds], hours:minutes:seconds or
    days-hours[:minutes[:seconds]]. None where it is none of them."""
    if limit.upper() in ("INFINITE", "UNLIMITED"):
        return math.inf
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit, re.ASCII):
        return None
    days, _, rest = limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    total = int(days or 0) * 86400 + sum(map(math.prod, zip(numbers, units, strict=False)))
    return total or math.inf


def script(job: ClusterJob, *, limit: str, lead: int, python: str, extra: Sequence[str] = ()) -> str:
    """The text for ``sbatch``. ``lead``: seconds before ``limit`` at which the run is told to save."""
    fewest = f"{job.min_nodes}:" if job.is_elastic else ""
    train = job.train(
        python,
        nnodes=f'"{fewest}$SLURM_JOB_NUM_NODES"',
        rdzv_backend="c10d",
        rdzv_endpoint='"$(hostname):$port"',
        rdzv_conf="is_host=0",
        rdzv_id='"$SLURM_JOB_ID"',
        max_restarts="1000" if job.is_elastic else "3",
    )
    gpus = f"#SBATCH --gpus-per-node={job.ranks_per_node}\n#SBATCH --exclusive\n"
    no_kill = "#SBATCH --no-kill\n" if job.is_elastic else ""
    return _SCRIPT.format(
        path=job.folder / "job.sbatch",
        name=job.name,
        nodes=f"{job.min_nodes}-{job.nodes}" if job.is_elastic else str(job.nodes),
        resources=(gpus if job.has_gpus else "") + no_kill,
        no_kill=" --no-kill" if job.is_elastic else "",
        limit=limit,
        lead=lead,
        folder=shlex.quote(str(job.folder)),
        extra="".join(f"#SBATCH {word}\n" for word in extra),
        here=shlex.quote(str(Path.cwd())),
        python=shlex.quote(python),
        train=train,
    )
