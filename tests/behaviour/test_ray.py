"""The job that ``fsdmoe launch --on ray`` writes, on a real Ray cluster of two nodes on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.elastic_kills import differences, environment, losses, uninterrupted, write_config
from tests.support.scripts import ROOT

STEPS = 30


def ray(*words: str, **others: str) -> subprocess.Popen[bytes]:
    """One of Ray's programs, which ends with this process's patience."""
    found = Path(sys.executable).with_name("ray")
    return subprocess.Popen([str(found), *words], cwd=ROOT, env=environment(**others), start_new_session=True)


class RayCluster:
    """A head and a second node, each of which has a CPU for one rank."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("ray.train", reason="needs pip install 'ray[train]'")
        common = ("--num-cpus", "1", "--block", "--disable-usage-stats", "--object-store-memory", "80000000")
        head = ("--head", "--port", "0", "--include-dashboard", "false", "--temp-dir", str(folder))
        self.nodes = [ray("start", *head, *common, RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")]
        self.address_file = folder / "ray_current_cluster"
        deadline = time.monotonic() + 120
        while not self.address_file.exists():
            assert time.monotonic() < deadline, "no head"
            time.sleep(0.2)
        self.address = self.address_file.read_text().strip()
        self.nodes.append(ray("start", "--address", self.address, *common))

    def kill(self, node: int) -> None:
        """Everything of a node at once, as if its power failed."""
        process = self.nodes[node]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a socket's path is short
    found = RayCluster(folder)
    try:
        yield found
    finally:
        for number in range(len(found.nodes)):
            if found.nodes[number].poll() is None:
                found.kill(number)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
def test_a_job_goes_on_when_a_node_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    config, run = write_config(tmp_path, STEPS), tmp_path / "run"
    words = ["--on", "ray", "--nodes", "1:2", "--gpus-per-node", "1", "--cpu", "--config", str(config)]
    subprocess.run(
        [sys.executable, "-m", "fsdmoe", "launch", *words], cwd=ROOT, env=environment(), check=True
    )
    with (tmp_path / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, str(run / "launch" / "ray_job.py")], cwd=ROOT, stdout=log, stderr=log,
            env=environment(RAY_ADDRESS=cluster.address),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while len(losses(run)) < 5:
            assert job.poll() is None, (tmp_path / "job.log").read_text()[-6000:]
            assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()[-6000:]
            time.sleep(0.2)
        cluster.kill(1)
        assert job.wait(300) == 0, (tmp_path / "job.log").read_text()[-6000:]
    finally:
        job.kill()
        job.wait()
    text = (tmp_path / "job.log").read_text()
    assert "2 x CPU" in text
    assert "1 x CPU" in text, "the second start had one node"
    assert differences(losses(run), uninterrupted(tmp_path, STEPS)) < 1e-5
