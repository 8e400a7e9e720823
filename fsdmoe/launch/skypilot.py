"""A SkyPilot task: a managed job whose spot instances are replaced, after which the run goes on."""

from __future__ import annotations

import json
import shlex
from textwrap import indent

from fsdmoe.launch.job import CONFIG_FILE, PORT, ClusterJob

_TASK = """\
# Written by fsdmoe launch. Submit it: sky jobs launch {path}
name: "{name}"
num_nodes: {nodes}
resources:
{resources}  use_spot: true
  job_recovery:
    max_restarts_on_errors: 3
workdir: .
{mounts}setup: |
  pip install '.[adapters,charts,data,datasets,torchao]'
run: |
  cat > {config_file} <<'END_OF_CONFIGURATION'
{config}
  END_OF_CONFIGURATION
  {train}
"""
_NAMES = {"a100": "A100-80GB"}
"""Of GPUs that are called otherwise here, but for dashes and capitals."""


def task(job: ClusterJob, *, config: str, gpu: str, bucket: str = "") -> str:
    """The task's YAML.

    Args:
        job: The run.
        config: The text of its configuration, which the task writes where the run reads it.
        gpu: The name of the accelerator, as plans have it.
        bucket: NAME:FOLDER, a bucket that is mounted there: what outlives the instances.
    """
    train = job.train(
        "python",
        nproc_per_node=str(job.ranks_per_node),
        nnodes='"$SKYPILOT_NUM_NODES"',
        node_rank='"$SKYPILOT_NODE_RANK"',
        master_addr='"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        master_port=str(PORT),
    )
    name, _, folder = bucket.partition(":")
    # In quotes, without which YAML takes 2024 for a number.
    mount = f"  {json.dumps(folder)}:\n    name: {json.dumps(name)}\n    mode: MOUNT\n"
    accelerator = _NAMES.get(gpu.lower()) or gpu.upper().replace("-", "")
    return _TASK.format(
        path=job.folder / "task.yaml",
        name=job.name,
        nodes=job.nodes,
        resources=f"  accelerators: {accelerator}:{job.ranks_per_node}\n" if job.has_gpus else "",
        mounts=f"file_mounts:\n{mount}" if bucket else "",
        config_file=shlex.quote(CONFIG_FILE.format(job.config_name)),
        config=indent(config.rstrip("\n"), "  "),
        train=train,
    )
