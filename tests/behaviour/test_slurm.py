"""The job that ``fsdmoe launch --on slurm`` writes, in a real Slurm."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.elastic_kills import differences, environment, losses, uninterrupted, write_config
from tests.support.slurm_cluster import SlurmCluster, is_installed


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path is short
    try:
        with SlurmCluster(folder) as found:
            found.environment |= environment(SLURM_CONF=found.environment["SLURM_CONF"])
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(what: str, is_true: Callable[[], object], logs: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            texts = [f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(logs.rglob("*.log"))]
            pytest.fail("\n".join([f"{what}: not within {seconds:.0f} s", *texts]))
        time.sleep(0.2)


def is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


@pytest.mark.full
@pytest.mark.skipif(not is_installed(), reason="needs slurm-wlm and munge")
def test_a_job_that_meets_its_time_limit_is_requeued_and_goes_on_with_one_node(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    config, run = write_config(tmp_path, steps=40), tmp_path / "run"
    logs = run / "launch"
    written = cluster.ask(
        sys.executable, "-m", "fsdmoe", "launch", "--on", "slurm", "--nodes", "1:2", "--gpus-per-node", "1",
        "--cpu", "--time", "10", "--lead", "65", "--submit", "--config", str(config),
    )  # fmt: skip
    job = written.split()[-1]
    assert job.isdecimal(), written

    until("five steps", lambda: len(losses(run)) >= 5, logs)
    # The run pauses, so that the limit comes before its end, however fast this machine is.
    first_rank = json.loads((run / "run.lock").read_text())["pid"]
    os.kill(first_rank, signal.SIGSTOP)
    began = cluster.ask("squeue", "--noheader", "--jobs", job, "--format=%M").split(":")
    cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={int(began[-2]) + 1}")
    cluster.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=lost")
    # Slurm's SIGTERM comes with SIGCONT.
    until("the signal ahead of the limit", lambda: not is_stopped(first_rank), logs)
    until("requeued", lambda: cluster.ask("squeue", "-h", "-j", job, "--format=%T") == "PENDING", logs)
    assert 5 <= len(losses(run)) < 40, "stopped in order, before its end"
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10")

    until("the end", lambda: not cluster.ask("squeue", "-h", "-j", job), logs)
    attempts = [line for line in (logs / f"slurm-{job}.log").read_text().splitlines() if "attempt" in line]
    assert "attempt 0 on 2 nodes" in attempts[0]
    assert "attempt 1 on 1 nodes" in attempts[1]
    assert "ExitCode=0:0" in cluster.ask("scontrol", "show", "job", job)
    assert (logs / f"{job}.0" / "node-1.log").exists(), "a log folder an attempt, a file a node"
    assert (logs / f"{job}.1" / "node-0.log").exists()
    assert differences(losses(run), uninterrupted(tmp_path, 40)) < 1e-5
