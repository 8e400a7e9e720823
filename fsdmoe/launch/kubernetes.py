"""Kubernetes objects of a run, as JSON, which ``kubectl`` takes.

Either a ``TrainJob`` of Kubeflow Trainer v2 on its runtime ``torch-distributed``, or, without it, an Indexed
Job and the headless Service that gives its pods names. The configuration travels in the object; code and
packages are in the image, and a claim holds what all pods share: checkpoints and data.
"""

from __future__ import annotations

import shlex
from typing import Any

from fsdmoe.launch.job import CONFIG_FILE, PORT, ClusterJob

_CONFIG = "FSDMOE_CONFIG"
_RESTARTS = 100
"""Of pods, over the whole run."""
_GRACE = {"terminationGracePeriodSeconds": 300}
"""For the last save, once a pod is told to end: without it 30 seconds."""


def train_job(job: ClusterJob, *, image: str, config: str, claim: str = "") -> dict[str, Any]:
    """A ``TrainJob``; its runtime sets the ``PET_`` variables of torchrun in every pod.

    Args:
        job: The run.
        image: With fsdmoe in it.
        config: The text of the configuration.
        claim: NAME:FOLDER, where a volume claim that all pods share is mounted.
    """
    line = job.train(
        "python",
        nproc_per_node='"$PET_NPROC_PER_NODE"',
        nnodes='"$PET_NNODES"',
        node_rank='"$PET_NODE_RANK"',
        master_addr='"$PET_MASTER_ADDR"',
        master_port='"$PET_MASTER_PORT"',
    )
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "command": _shell(job, line),
        "env": [{"name": _CONFIG, "value": config}],
    }
    if job.has_gpus:
        trainer["resourcesPerNode"] = _resources(job)
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    volumes, mounts = _volumes(claim)
    pod = _GRACE | {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    patch = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patch]}}}
    spec["runtimePatches"] = [{"manager": "fsdmoe.org/launch", "trainingRuntimeSpec": runtime}]
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job.name, spec)


def indexed_job(job: ClusterJob, *, image: str, config: str, claim: str = "") -> list[dict[str, Any]]:
    """A headless Service and an Indexed Job; arguments as of :func:`train_job`.

    Pod 0 also holds the store in which launchers meet. A pod that fails is started again in its place.
    """
    fewest = f"{job.min_nodes}:" if job.is_elastic else ""
    store = f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then python -m fsdmoe.launch.store --port {PORT} & fi'
    line = job.train(
        "python",
        nnodes=f"{fewest}{job.nodes}",
        rdzv_backend="c10d",
        rdzv_endpoint=f'"$MEETING_HOST:{PORT}"',
        rdzv_conf="is_host=0",
        rdzv_id=job.name,
        max_restarts="1000" if job.is_elastic else "3",
    )
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "command": _shell(job, line, store),
        "env": [
            {"name": _CONFIG, "value": config},
            {"name": "MEETING_HOST", "value": f"{job.name}-0.{job.name}"},
        ],
        "ports": [{"containerPort": PORT}],
    }
    if job.has_gpus:
        container["resources"] = _resources(job)
    volumes, container["volumeMounts"] = _volumes(claim)
    pod = {
        **_GRACE,
        "subdomain": job.name,
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": volumes,
    }
    spec = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": _RESTARTS,
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    # Pods find each other before they are ready: none is, until all have met.
    service = {"clusterIP": "None", "selector": {"app": job.name}, "publishNotReadyAddresses": True}
    return [_object("v1", "Service", job.name, service), _object("batch/v1", "Job", job.name, spec)]


def _shell(job: ClusterJob, line: str, *before: str) -> list[str]:
    """The container's command: the configuration becomes a file."""
    file = shlex.quote(CONFIG_FILE.format(job.config_name))
    lines = [f'printf "%s" "${_CONFIG}" > {file}', *before, f"exec {line}"]
    return ["/bin/bash", "-c", "\n".join(lines)]


def _resources(job: ClusterJob) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}}


def _volumes(claim: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shared memory as large as the pod may have, for NCCL and for copies of checkpoints (a container has 64
    MB of its own), and the claim, if any."""
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    if claim:
        name, _, folder = claim.partition(":")
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": "shared", "mountPath": folder})
    return volumes, mounts


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
