"""Real NCCL ranks on one GPU: NCCL takes them if each claims a host of its own; they talk over sockets."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}  # fmt: skip


def free_port() -> str:
    """Below those that the system gives to connections: one of these may be taken before it is used."""
    while True:
        port = random.SystemRandom().randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def run_ranks_on_one_gpu(world_size: int, *arguments: str) -> str:
    """Python with these arguments on every rank; all that they printed. Once a rank has failed, the others
    are given a while to say what they know."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        printed = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                env=os.environ | ONE_GPU | {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                    "MASTER_PORT": port, "NCCL_HOSTID": f"h{rank}",
                },
            )
            for rank, output in enumerate(printed)
        ]  # fmt: skip
        try:
            deadline, has_failed = time.monotonic() + 300, False
            while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
                if not has_failed and any(codes):
                    deadline, has_failed = time.monotonic() + 10, True
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for output in printed:
            output.seek(0)
        outputs = [output.read() for output in printed]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return "".join(outputs)
