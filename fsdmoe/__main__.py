"""``fsdmoe train``, also ``python -m fsdmoe train``: a run with all its ranks on this host.

Other commands: ``python -m fsdmoe.plan``, ``.data``, ``.observe`` and ``.checkpoint``.
"""

from __future__ import annotations

import os
import sys

from fsdmoe.launch import launch, run_rank


def main() -> int:
    """Of the console script; a launcher's rank, which has a number, is that and starts no others."""
    match sys.argv[1:]:
        case ["train", *arguments]:
            return run_rank(arguments) if "RANK" in os.environ else launch(arguments)
        case [] | ["--help" | "-h"]:
            print("usage: fsdmoe train [--nproc-per-node N] [--config FILE.toml] ... (fsdmoe train --help)")
            return 0
        case [word, *_]:
            print(f"fsdmoe: {word}: expected train, got another command; see fsdmoe --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
