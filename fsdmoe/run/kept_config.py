"""A run keeps its configuration in its folder, so that it can be read, compared and resumed without retyping
it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdmoe.checkpoint.agree import from_first
from fsdmoe.checkpoint.catalog import entries
from fsdmoe.checkpoint.config import RUN_FOLDER
from fsdmoe.checkpoint.limited_storage import Limits
from fsdmoe.checkpoint.start_place import is_same_folder
from fsdmoe.checkpoint.storage import open_storage
from fsdmoe.config import CommandLine, Config
from fsdmoe.config.kept import (
    KEPT,
    first_start_line,
    kept_text,
    read_kept,
    start_problems,
    write_kept,
)
from fsdmoe.config.schema import by_dotted_key
from fsdmoe.core import events
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.experts.dispatch import ExpertLayout, choose_dispatcher
from fsdmoe.kernels.backend import triton_for
from fsdmoe.mesh import Meshes
from fsdmoe.parallel.auto_model import build_any_model

logger = logging.getLogger(__name__)


@dataclass
class KeptConfig:
    """The configuration of a run and the text to keep of it."""

    folder: Path
    text: str
    is_due: bool
    """Whether it is yet to be written."""
    told: frozenset[str] = frozenset()
    """Changes since the last start that have been told."""

    def write(self) -> None:
        """Write it, once; its error is every rank's. Collective."""
        if self.is_due:
            from_first(lambda: write_kept(self.folder, self.text))
        self.is_due = False


def keep_config(
    command: CommandLine, meshes: Meshes, decisions: Mapping[str, str] | None = None
) -> KeptConfig:
    """Say what has changed since the last start of the run, and write the configuration into its folder.

    Where checkpoints are, the caller writes it once one of them is loaded: a start that fails at it must not
    change what is said of them. A run that only evaluates writes nothing. ``decisions``: by key, what was
    decided otherwise. Collective.

    Raises:
        ConfigError: The checkpoints in the folder are of another model; names the keys. On all ranks.
    """
    config = command.config
    folder = Path(config.train.output_dir).expanduser()
    has_checkpoints = from_first(lambda: holds_checkpoints(config))
    first_start = from_first(lambda: first_start_line(config, has_checkpoints=has_checkpoints))
    text = kept_text(config, command.origins, decided(config, meshes) | dict(decisions or {}), first_start)
    kept = KeptConfig(folder, text, is_due=not command.evaluate_only)
    if has_checkpoints:
        kept.told = frozenset(from_first(lambda: told_changes(folder, config)))
    else:  # nothing goes on from what was there before
        if command.resumes and config.checkpoint.load == "latest":
            from_first(lambda: warn_of_lost_checkpoints(folder, config))
        kept.write()
    return kept


def told_changes(folder: Path, config: Config) -> list[str]:
    """The changes since the run's last start, which are told here; for the first rank."""
    refuse(start_problems(config))
    path = folder / KEPT
    problems: list[str] = []
    before = read_kept(path, problems) if path.is_file() else None
    if problems:
        logger.warning("%s cannot be compared with the configuration of today: %s", path, problems[0])
    # Another folder's checkpoints are not what the file speaks of.
    if before is None or not is_same_folder(before.checkpoint.folder, config.checkpoint.folder):
        return []
    refuse_other_model(before, config, folder)
    # An older checkpoint that is named may be of another optimizer than the last start.
    if config.checkpoint.load == "latest" and not config.checkpoint.load_only_model:
        refuse_other_optimizer(before, config, folder)
    lines = {key: f"{key} {change}" for key, change in differences(before, config).items()}
    for key, line in lines.items():
        why_unread = _unread(key, config)
        logger.info("changed since the last start: %s%s", line, f"; {why_unread}" if why_unread else "")
    warn_of_trained_documents(before, config)
    warn_of_dropped_average(before, config)
    return list(lines.values())


def _unread(key: str, config: Config) -> str:
    """Why a key, or a part of what it says, has no effect on a run that goes on; empty where it has all."""
    if config.checkpoint.load == "none":
        return ""
    # Frozen weights in codes are in no checkpoint, and read again from the folder.
    if key in ("model.hf", "model.random_weights") and config.precision.frozen_dtype is None:
        return "weights are those of the checkpoint"
    is_dynamic = not config.precision.loss_scale.is_static
    if key == "precision.loss_scale.initial" and is_dynamic and not config.checkpoint.load_only_model:
        return "no effect: the scale is that of the checkpoint"
    return ""


def warn_of_trained_documents(before: Config, now: Config) -> None:
    """Where more of the same documents are held out than before."""
    if now.data.holdout > before.data.holdout:
        logger.warning(
            "data.holdout was %g: documents that are held out only since now have been trained on, so that "
            "the held-out loss is lower than that of new text",
            before.data.holdout,
        )


def warn_of_dropped_average(before: Config, now: Config) -> None:
    """Where the checkpoints that hold averaged weights are followed by some that do not."""
    if before.optim.ema.decay and not now.optim.ema.decay and now.checkpoint.load != "none":
        logger.warning(
            "optim.ema.decay was %g: the averaged weights in the checkpoint are not loaded, and new ones "
            "hold none, so they are lost once it is no longer kept (keep_last = %d); copy it to "
            "another name than step_N to keep them, or set the key back",
            before.optim.ema.decay,
            now.checkpoint.keep_last,
        )


def differences(before: Config, now: Config) -> dict[str, str]:
    """The keys whose values differ, each with both values (``16 -> 8``)."""
    # By JSON, so that values look as those that checkpoints hold.
    values = [by_dotted_key(json.loads(json.dumps(dataclasses.asdict(each)))) for each in (before, now)]
    # A table that one of them lacks is none there, and has no keys: those of the other are told.
    pairs = {key: [each.get(key) for each in values] for key in values[0] | values[1]}
    return {key: f"{old!r} -> {new!r}" for key, (old, new) in pairs.items() if old != new}


def refuse_other_model(before: Config, now: Config, folder: Path) -> None:
    """Refuse checkpoints of a model that has other parameters.

    Which keys make it another one is found by building the earlier model with one of them changed at a time,
    on the meta device. A start with adapters from a run without, or the reverse, needs no model for it.
    """
    fields = [
        (section, field.name)
        for section in ("model", "adapter")
        for field in dataclasses.fields(getattr(before, section))
        if getattr(getattr(before, section), field.name) != getattr(getattr(now, section), field.name)
    ]
    if before.adapter.is_on != now.adapter.is_on:
        decisive = ["adapter.rank", "adapter.kind"]
    elif not fields or _parameters(before) == _parameters(now):
        return
    else:
        decisive = [f"{section}.{name}" for section, name in fields if _is_other(before, now, section, name)]
    # Keys may matter only together; and who wrote a preset knows that key best.
    named = decisive or [f"{section}.{name}" for section, name in fields]
    named = [f"{section}.{name}" for section, name in fields if name == "preset"] + named
    told = [
        f"{key} {change}"
        for key, change in differences(before, now).items()
        if any(key == name or key.startswith(f"{name}.") for name in named)
    ]
    raise ConfigError(
        f"{', '.join(told)}: expected the model of the checkpoints in {folder}, which cannot be resumed as "
        "another; set it back, or give this run another train.output_dir"
    )


def refuse_other_optimizer(before: Config, now: Config, folder: Path) -> None:
    """Refuse checkpoints with the state of another optimizer, or with moments that are not converted."""
    keys = ["optim.name"]
    if before.optim.name == now.optim.name and _codes(before) != _codes(now):
        keys = [f"optim.{each}moment_dtype" for each in ("", "first_", "second_")]
    told = [f"{key} {change}" for key, change in differences(before, now).items() if key in keys]
    if told:
        raise ConfigError(
            f"{', '.join(told)}: expected the optimizer of the checkpoints in {folder}, whose state is not "
            "converted; set it back, or take up the weights alone by checkpoint.load_only_model = true"
        )


def _codes(config: Config) -> list[str]:
    """The formats of moments; plain numbers are converted into each other."""
    return ["" if kept in ("float32", "bfloat16") else kept for kept in config.optim.moment_dtypes]


def _is_other(before: Config, now: Config, section: str, name: str) -> bool:
    """Whether the one field makes another model of the earlier one, or none at all."""
    try:
        changed = dataclasses.replace(
            getattr(before, section), **{name: getattr(getattr(now, section), name)}
        )
        return _parameters(before) != _parameters(dataclasses.replace(before, **{section: changed}))
    except ConfigError:
        return True


def _parameters(config: Config) -> dict[str, tuple[int, ...]]:
    model, _ = build_any_model(config.model, config.experts, config.adapter)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def warn_of_lost_checkpoints(folder: Path, config: Config) -> None:
    """Of a run that is to go on and has saved, but not where its configuration says."""
    saves = [row for row in events.read(folder) if row["event"] == "save"]
    if saves:
        place = config.checkpoint.folder or f"{folder}/{RUN_FOLDER}"
        logger.warning(
            "--resume: %s has saved step %s, and %s has no checkpoint that is whole: the run begins anew. If "
            "they are elsewhere, stop it and name their place by --checkpoint.folder",
            folder, saves[-1].get("step"), place,
        )  # fmt: skip


def holds_checkpoints(config: Config) -> bool:
    """Whether the run has saved something that it may resume from."""
    own = Path(config.train.output_dir).expanduser() / RUN_FOLDER
    checkpoint = config.checkpoint
    storage = open_storage(checkpoint.folder or own, Limits(checkpoint.retries, checkpoint.hang_seconds))
    storage.recover()  # as the load does: a save that was interrupted may have left one under another name
    return bool(entries(storage))


def decided(config: Config, meshes: Meshes) -> dict[str, Any]:
    """What this start takes for keys that leave it open."""
    found: dict[str, Any] = {}
    if config.mesh.dp_shard == -1:
        found["mesh.dp_shard"] = f"{meshes.degrees.dp_shard} (all ranks that the other axes leave)"
    if config.experts.dispatcher == "auto" and config.model.num_experts:
        degrees = meshes.degrees
        layout = ExpertLayout(
            config.model.num_experts, config.model.num_experts_per_tok, degrees.ep, degrees.etp
        )
        choice = choose_dispatcher(layout, config.experts.clones)
        found["experts.dispatcher"] = f"{choice.dispatcher} ({choice.reason})"
    if config.train.kernels == "auto":
        like_weights = torch.empty(0, dtype=torch.bfloat16, device=meshes.device)
        plain = "plain torch (the fused kernels need a GPU that computes in bfloat16)"
        found["train.kernels"] = plain if triton_for(like_weights) is None else "fused kernels, by Triton"
    return found
