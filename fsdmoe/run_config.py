"""A run keeps its configuration in its folder, so that it can be read, compared and resumed without retyping
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdmoe.checkpoint.agree import from_first
from fsdmoe.checkpoint.catalog import RUN_FOLDER, entries
from fsdmoe.checkpoint.storage import open_storage
from fsdmoe.config import CommandLine, Config
from fsdmoe.config.kept import kept_text, write_kept
from fsdmoe.experts.dispatch import ExpertLayout, choose_dispatcher
from fsdmoe.kernels.backend import triton_for
from fsdmoe.mesh import Meshes


@dataclass
class KeptConfig:
    """The configuration of a run and the text to keep of it."""

    folder: Path
    text: str
    is_due: bool
    """Whether it is yet to be written."""

    def write(self) -> None:
        """Write it, once; its error is every rank's. Collective."""
        if self.is_due:
            from_first(lambda: write_kept(self.folder, self.text))
        self.is_due = False


def keep_config(command: CommandLine, meshes: Meshes) -> KeptConfig:
    """Write the configuration into the folder of the run, which it holds. Where checkpoints are, that is left
    to the caller, for when one of them is loaded: a start that fails at it must not change what is said of
    them. A run that only evaluates writes nothing. Collective."""
    config = command.config
    folder = Path(config.train.output_dir).expanduser()
    text = kept_text(config, command.origins, decided(config, meshes))
    kept = KeptConfig(folder, text, is_due=not command.evaluate_only)
    if not from_first(lambda: holds_checkpoints(config)):
        kept.write()
    return kept


def holds_checkpoints(config: Config) -> bool:
    """Whether the run has saved something that it may resume from."""
    own = Path(config.train.output_dir).expanduser() / RUN_FOLDER
    return bool(entries(open_storage(config.checkpoint.folder or own)))


def decided(config: Config, meshes: Meshes) -> dict[str, Any]:
    """What this start takes for keys that leave it open."""
    found: dict[str, Any] = {}
    if config.mesh.dp_shard == -1:
        found["mesh.dp_shard"] = meshes.degrees.dp_shard
    if config.experts.dispatcher == "auto" and config.model.num_experts:
        degrees = meshes.degrees
        layout = ExpertLayout(
            config.model.num_experts, config.model.num_experts_per_tok, degrees.ep, degrees.etp
        )
        choice = choose_dispatcher(layout)
        found["experts.dispatcher"] = f"{choice.dispatcher} ({choice.reason})"
    if config.train.kernels == "auto":
        like_weights = torch.empty(0, dtype=torch.bfloat16, device=meshes.device)
        found["train.kernels"] = "plain torch" if triton_for(like_weights) is None else "Triton"
    return found
