"""``fsdmoe COMMAND``, also ``python -m fsdmoe COMMAND``: ``train`` is a run with all its ranks on this host,
and ``check`` a look at its machines before one.

The others are those of packages: ``fsdmoe plan`` is ``python -m fsdmoe.plan``.
"""

from __future__ import annotations

import importlib
import os
import sys

import fsdmoe
from fsdmoe.core.rules import nearest
from fsdmoe.launch.ranks import launch, run_rank

_PACKAGES = ("plan", "launch", "checkpoint", "observe", "data")


def main() -> int:
    """Of the console script; a launcher's rank, which has a number, is that and starts no others."""
    match sys.argv[1:]:
        case ["train", *arguments]:
            return run_rank(arguments) if "RANK" in os.environ else launch(arguments)
        case ["check", *arguments]:
            return launch([*arguments, "--check-only"])
        case [word, *arguments] if word in _PACKAGES:
            # imported when it is asked for: not all of them need torch, which takes seconds
            return importlib.import_module(f"fsdmoe.{word}.__main__").main(arguments) or 0
        case [] | ["--help" | "-h"]:
            options = "[--nproc-per-node N] [--config FILE.toml] ... (fsdmoe train --help)"
            print(f"usage: fsdmoe train|check {options}")
            print(f"       fsdmoe {'|'.join(_PACKAGES)} ... (fsdmoe plan --help)")
            print("       fsdmoe --version")
            return 0
        case ["--version"]:
            print(f"fsdmoe {fsdmoe.__version__}")
            return 0
        case [word, *_]:
            found = nearest(word, ("train", "check", *_PACKAGES))
            print(f"fsdmoe: {word}: expected a command, got another word; {found}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
