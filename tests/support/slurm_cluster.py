"""A Slurm cluster on this machine: a controller and two nodes, as processes of this one.

Debian's packages ``slurm-wlm`` and ``munge`` are enough; nothing is written outside of the folder, and all
daemons are ended on exit. For a look at it by hand::

    python -m tests.support.slurm_cluster FOLDER      # prints the variable to export, and waits for Ctrl-C
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
# A requeued job waits until the credentials of its last start have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    """Whether all programs are here."""
    return all(_find(name) for name in PROGRAMS)


class SlurmCluster:
    """Its daemons, and the environment in which ``sbatch`` and the others find them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        folder = self.folder
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir(exist_ok=True)
        where = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs=1"
        nodes = "\n".join(f"NodeName={name} {where} Port={_free_port()}" for name in NODES)
        (folder / "slurm.conf").write_text(
            _CONF.format(
                host=socket.gethostname(), controller=_free_port(), folder=folder, user=_user(), nodes=nodes,
                names=",".join(NODES),
            )
        )  # fmt: skip
        try:
            # --force: it would refuse folders that others may write to, such as /tmp.
            files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
            socket_file = f"--socket={folder}/munge.socket"
            self._start("munged", "--foreground", "--force", socket_file, *files.values())
            _until("munged", (folder / "munge.socket").exists)
            self._start("slurmctld", "-D", "-i")
            for name in NODES:
                self._start("slurmd", "-D", "-N", name)
            _until("two idle nodes", lambda: self.ask("sinfo", "--noheader", "--format=%D %t") == "2 idle")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def ask(self, *words: str) -> str:
        """What one of Slurm's programs prints; empty where it fails."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [_find(name), *words],
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _stop(self) -> None:
        if len(self._daemons) > 1:
            self.ask("scancel", "--state=RUNNING")
            self.ask("scancel", "--state=PENDING")
            deadline = time.monotonic() + 30
            while self.ask("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()


def _find(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _user() -> str:
    import getpass

    return getpass.getuser()


def _until(what: str, is_true: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def main() -> int:
    with SlurmCluster(Path(sys.argv[1]).resolve()) as cluster:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main())
