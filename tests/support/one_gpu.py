"""Real NCCL ranks on one GPU: NCCL takes them if each claims a host of its own; they talk over sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}  # fmt: skip


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks_on_one_gpu(world_size: int, *arguments: str) -> str:
    """Python with these arguments on every rank; all that they printed."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=os.environ | ONE_GPU | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "MASTER_PORT": port, "NCCL_HOSTID": f"h{rank}",
            },
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return "".join(outputs)
