"""What ``train.graphs`` needs of the machine."""

from __future__ import annotations

from fsdmoe.config.schema import Config
from fsdmoe.errors import ConfigError


def require_gpu(graphs: str, device_type: str) -> None:
    """Refuse graphs on a device that has none."""
    if graphs != "none" and device_type != "cuda":
        raise ConfigError(
            f'train.graphs: expected a GPU for "{graphs}", got a run on {device_type}: graphs are CUDA\'s; '
            'set train.graphs = "none"'
        )


def device_problems(config: Config, *, has_gpu: bool) -> list[str]:
    """What this machine cannot run."""
    try:
        require_gpu(config.train.graphs, "cuda" if has_gpu else "cpu")
    except ConfigError as error:
        return list(error.problems)
    return []
