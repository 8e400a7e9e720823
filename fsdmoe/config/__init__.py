"""One configuration from a TOML file and dotted command-line overrides, strictly checked before anything is
built::

    torchrun train.py --config configs/quickstart.toml --mesh.ep 4 --train.steps 50

    schema        the sections, each declared next to its part, in one Config
    values        a section from what a file or a command line holds
    removed       keys that earlier versions had, each with what to write instead or the reason
    checks        rules across sections, each written at its owner and called here; disk and hf are their kin
    build         a mapping and overrides -> Config, or every finding
    toml          files, read and written
    kept          the file that a run keeps in its folder, with what came from where
    command_line  flags, --help, the exit code
    start         all ranks have the same configuration

All findings (unknown keys, wrong types, impossible combinations) are collected and reported together, on
rank 0, as plain lines that name the key and the fix; the exit code is 2.
"""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.config.build import build_config
    from fsdmoe.config.checks import cross_problems
    from fsdmoe.config.command_line import CommandLine, load_config
    from fsdmoe.config.schema import Config
    from fsdmoe.config.start import start_meshes
    from fsdmoe.config.toml import to_toml
    from fsdmoe.config.train import TrainConfig

__getattr__ = lazy_names(__name__, __file__)
