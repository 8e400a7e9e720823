"""``python -m fsdmoe.launch.store --port 29400``: where the launchers of an elastic run meet.

It is a process of its own, so that the loss of any launcher leaves it in place. It ends by a signal.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Listen until SIGTERM or Ctrl-C."""
    options = argparse.ArgumentParser(prog="python -m fsdmoe.launch.store", description=__doc__)
    options.add_argument(
        "--port", type=int, required=True, help="that all nodes can reach; 0 takes a free one"
    )
    port = options.parse_args(arguments).port
    import torch.distributed as dist  # not above: it takes seconds, and a wrong option none

    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"fsdmoe: launchers meet at port {store.port}", flush=True)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
