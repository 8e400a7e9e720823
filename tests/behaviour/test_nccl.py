"""Real NCCL ranks on one GPU: each claims a host of its own, so collectives go over loopback sockets.

Right for streams, hooks and numbers; meaningless for bandwidth.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdmoe.config import to_toml
from fsdmoe.testing import requires_nccl
from tests.behaviour.tiny_run import tiny_config

pytestmark = requires_nccl
ROOT = Path(__file__).parent.parent.parent
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
BF16 = {
    "precision__param_dtype": "bfloat16", "train__steps": 10, "data__seq_len": 128, "model__hidden_size": 128,
    "model__head_dim": 32, "model__moe_intermediate_size": 64,
}  # fmt: skip


def losses(folder: Path, world_size: int, **overrides: object) -> list[float]:
    folder.mkdir()
    config = folder / "run.toml"
    config.write_text(to_toml(tiny_config(str(folder / "run"), world_size, **(BF16 | overrides))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config", str(config)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=os.environ | ONE_GPU | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "MASTER_PORT": port, "NCCL_HOSTID": f"h{rank}",
            },
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_four_ranks_give_the_losses_of_one_under_every_expert_layout(tmp_path: Path) -> None:
    one = losses(tmp_path / "one", 1)
    assert len(one) == 10
    assert one[-1] < one[0] - 0.05
    layouts = {"ep 4": (4, 1), "ep 2, edp 2": (2, 1), "etp 2, ep 2": (2, 2)}
    for name, (ep, etp) in layouts.items():
        four = losses(tmp_path / name.replace(" ", ""), 4, mesh__ep=ep, mesh__etp=etp)
        worst = max(abs(a - b) / a for a, b in zip(one, four, strict=True))
        print(f"{name}: worst relative difference to one rank over 10 steps {worst:.1e}")
        assert four == pytest.approx(one, rel=2e-2), name
