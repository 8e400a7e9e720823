"""Train a Mixture-of-Experts language model: ``torchrun train.py --config configs/quickstart.toml``.

``fsdmoe train --config configs/quickstart.toml`` does the same, and starts the ranks itself. Read
``fsdmoe/train.py`` next: the run, from top to bottom.
"""

from __future__ import annotations

import sys

from fsdmoe.config import load_config
from fsdmoe.launch.ranks import shutdown


def main() -> int:
    """Check the configuration and say what will be done before torch is loaded, which takes seconds."""
    command = load_config(sys.argv[1:])
    command.say_what_comes()
    from fsdmoe.train import train

    return train(command)


if __name__ == "__main__":
    sys.exit(shutdown(main()))
