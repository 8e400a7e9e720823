"""The first thing that all ranks of a run do together: see that they run the same one. Each has read its own
command line and its own copy of the file."""

from __future__ import annotations

import dataclasses

from fsdmoe.config.schema import Config, by_dotted_key
from fsdmoe.core.all_ranks import require_alike
from fsdmoe.core.process_group import init_distributed
from fsdmoe.mesh import Meshes, build_meshes


def start_meshes(config: Config) -> Meshes:
    """The meshes of a run. Collective.

    Raises:
        ConfigError: On all ranks, where some have another configuration than others; names every key.
    """
    init_distributed()
    fix = "start all ranks with the same command line and the same file"
    require_alike(by_dotted_key(dataclasses.asdict(config)), fix)
    return build_meshes(config.mesh)
