"""A run under Ray Train: one worker a node, each of which starts that node's ranks as ``fsdmoe train`` does.

Ray replaces workers and nodes that are lost and starts all workers again, on as many nodes as there are. The
run then goes on from its last checkpoint. Ray is imported here alone.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from fsdmoe.launch.job import ClusterJob

_SCRIPT = '''\
"""Written by fsdmoe launch. Run it on the cluster: ray job submit --working-dir . -- python {path}"""

from fsdmoe.launch.ray_train import run

if __name__ == "__main__":
    run(
        {name!r},
        nodes=({min_nodes}, {nodes}),
        ranks_per_node={ranks_per_node},
        has_gpus={has_gpus},
        arguments={arguments!r},
        storage={storage!r},
    )
'''
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def script(job: ClusterJob) -> str:
    """The text of the job's driver."""
    return _SCRIPT.format(
        path=job.folder / "ray_job.py",
        name=job.name,
        min_nodes=job.min_nodes,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        has_gpus=job.has_gpus,
        arguments=list(job.arguments),
        storage=str(job.folder / "ray"),
    )


def run(
    name: str,
    *,
    nodes: tuple[int, int],
    ranks_per_node: int,
    has_gpus: bool,
    arguments: Sequence[str],
    storage: str,
) -> None:
    """Train under Ray until the run is done; for the driver of a job.

    Args:
        name: Of the job.
        nodes: The fewest and the most.
        ranks_per_node: Ranks, and GPUs where there are any, of one node.
        has_gpus: False asks for one CPU a rank instead.
        arguments: Of ``fsdmoe train``.
        storage: Folder for Ray's own notes on the job, which all nodes share.

    Raises:
        ImportError: Ray is not installed.
        ray.train.TrainingFailedError: The run failed too often in a row.
    """
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError as error:
        raise ImportError("--on ray needs Ray Train: pip install 'ray[train]'") from error
    fewest, most = nodes
    kind = "GPU" if has_gpus else "CPU"
    trainer = DataParallelTrainer(
        _train_node,
        train_loop_config={"ranks": ranks_per_node, "arguments": list(arguments), "name": name},
        scaling_config=ScalingConfig(
            num_workers=most if fewest == most else (fewest, most),
            use_gpu=has_gpus,
            resources_per_worker={kind: ranks_per_node},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(name=name, storage_path=storage, failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def _train_node(given: dict[str, Any]) -> None:
    """A worker: the launcher of one node, in a process of its own, for signals reach main threads only."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    meeting = None
    if context.get_world_rank() == 0:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            meeting = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    meeting = broadcast_from_rank_zero(meeting)
    address, _, port = meeting.partition(":")
    launcher = [
        sys.executable, "-m", "fsdmoe", "train", "--nnodes", str(context.get_world_size()),
        "--nproc-per-node", str(given["ranks"]), "--node-rank", str(context.get_world_rank()),
        "--master-addr", address, "--master-port", port, "--rdzv-id", given["name"],
    ]  # fmt: skip
    with subprocess.Popen([*launcher, *given["arguments"]], preexec_fn=_end_with_parent) as process:
        code = process.wait()
    if code:
        raise RuntimeError(f"the launcher of node {context.get_world_rank()} ended with exit code {code}")


def _end_with_parent() -> None:
    """A worker that Ray ends takes its ranks along, which save first."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
