"""Configurations of runs that train a Hugging Face folder (``model.hf``): what the folder decides, and what
cannot be asked of a wrapped model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fsdmoe.config.schema import Config
from fsdmoe.config.values import Problems
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.data.tokenizer import tokenizer_file
from fsdmoe.models.config import ModelConfig

_PRINTED = {"architecture", "vocab_size", "hidden_size", "num_hidden_layers"}
"""Keys that a printed configuration writes next to ``hf``, and nobody by hand."""


def settle_preset(values: dict[str, Any], table: Any, overrides: Collection[str], problems: Problems) -> None:
    """Take the preset out of a ``model`` section that names a folder: ``--model.hf`` takes the place of a
    preset in the file, and any other preset next to a folder is refused.

    Args:
        values: The section.
        table: What the file wrote of it.
        overrides: The keys of the command line.
        problems: Gets a line for a preset that is refused.
    """
    if "preset" not in values:
        return
    preset = values.pop("preset")
    by_command, folder_by_command = (f"model.{key}" in overrides for key in ("preset", "hf"))
    # Earlier versions printed configurations of a folder with the preset's default.
    is_printed = preset == ModelConfig.preset and isinstance(table, dict) and table.keys() >= _PRINTED
    if not by_command and (folder_by_command or is_printed):
        return
    fix = "take preset out of [model] in the file of --config"
    if by_command:
        fix = f"drop --model.preset, or {'drop --model.hf' if folder_by_command else 'add --model.hf none'}"
    problems.append(
        f"model.preset: expected none, since the folder of model.hf decides the model, got {preset!r}; {fix}"
    )


def apply_hf(values: dict[str, Any], problems: Problems) -> None:
    """Fill the ``model`` section from the folder. A written key that says otherwise is a mistake; one that
    says the same may come from a printed configuration."""
    from fsdmoe.huggingface.folder import hf_fields  # only when chosen: it loads torch

    try:
        _require_no_file(values["hf"])
        fields = hf_fields(values["hf"])
    except (ConfigError, ImportError) as error:
        problems.extend(error.problems if isinstance(error, ConfigError) else [f"model.hf: {error}"])
        values["hf"] = None  # so that what is wrong elsewhere is reported too
        return
    stated = {f.name: f.default for f in dataclasses.fields(ModelConfig)} | fields
    earlier = _printed_earlier(fields) if values.keys() >= _PRINTED else {}
    for key in [key for key in values if key in stated and key not in ("hf", "random_weights")]:
        written = None if values[key] == "none" else values[key]
        if not _says_the_same(written, stated[key]) and written not in earlier.get(key, ()):
            problems.append(
                f"model.{key}: the folder of model.hf means {stated[key]!r}, got {written!r}; drop the key"
            )
    values.update(fields)


def _printed_earlier(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What earlier versions printed of families whose own names for it they did not read."""
    unread = {"num_experts": (1,), "num_experts_per_tok": (1,), "n_shared_experts": (0,)}
    return unread | {"first_k_dense_replace": (0, fields["num_hidden_layers"])}


def _require_no_file(hf: Any) -> None:
    path = Path(str(hf)).expanduser()
    if path.is_file():
        fix = f"name its folder, {path.parent}" if (path.parent / "config.json").is_file() else "name one"
        raise ConfigError(f"model.hf: expected a folder with a config.json, got the file {hf!r}; {fix}")


def _says_the_same(written: Any, stated: Any) -> bool:
    if isinstance(written, dict) and dataclasses.is_dataclass(stated):
        return all(str(value) == str(getattr(stated, key, "")).lower() for key, value in written.items())
    if isinstance(written, list) and isinstance(stated, tuple):
        return written == list(stated)
    return str(written) == str(stated)


def apply_hf_data(hf: str, values: dict[str, Any], problems: Problems, *, needs_data: bool = True) -> None:
    """Fill the ``data`` section: the folder's tokenizer is the default. What to train on has none: the quick
    start's corpus is not what somebody with a model wants."""
    if needs_data and not {"kind", "path", "sources"} & values.keys():
        problems.append(
            "data.path: expected data to train the model of model.hf on, got none; write, for example, "
            "--data.kind chat --data.path conversations.jsonl (--data.kind python-stdlib for a try)"
        )
    if "tokenizer" in values:
        return
    if tokenizer_file(hf).is_file():
        values["tokenizer"] = hf
    elif needs_data and _kinds(values) != {"tokens"}:
        problems.append(
            "data.tokenizer: expected the tokenizer of the model, got none, and the folder of model.hf has "
            'no tokenizer.json; give its path ("bytes" for a model of bytes)'
        )


def _kinds(data: dict[str, Any]) -> set[Any]:
    """Of the sources that a ``data`` table names."""
    sources = data.get("sources")
    if isinstance(sources, list) and all(isinstance(source, dict) for source in sources):
        return {source.get("kind") for source in sources}
    return {data.get("kind")}


def check_attention(config: Config) -> None:
    """Refuse rows that are split where the folder's model attends in a way that split rows cannot."""
    fixes = _whole_attention(config)
    if config.model.hf is not None and fixes:
        from fsdmoe.huggingface.folder import hf_limits  # only when chosen: it loads torch

        refuse(hf_limits(config.model.hf, config.data.seq_len, fixes))


def _whole_attention(config: Config) -> list[str]:
    """The settings without which the model's attention would be its own, of those that are in use."""
    mesh, context = config.mesh, config.context_parallel
    in_use = {
        "mesh.cp = 1": mesh.cp > 1,
        "mesh.tp = 1": mesh.tp > 1,
        "context_parallel.dynamic = false": context.dynamic,
        "context_parallel.varlen = never": context.varlen == "always",
    }
    return [fix for fix, is_used in in_use.items() if is_used]
