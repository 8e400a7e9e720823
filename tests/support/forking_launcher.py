"""``forking_launcher.py RANKS script arguments``: starts ranks as torchrun does and waits for them, but forks
them, so that they need not import what their launcher has imported."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    num_ranks, script, *arguments = sys.argv[1:]
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    os.environ |= {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        started = [start(rank, folder, script, arguments) for rank in range(int(num_ranks))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    sys.exit(max(map(abs, codes)))


def start(rank: int, folder: str, script: str, arguments: list[str]) -> int:
    """The process of a rank."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(Path(folder, str(rank)))
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # past what was the launcher's to clean up


if __name__ == "__main__":
    main()
