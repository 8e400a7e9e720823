"""A mapping and overrides to a checked :class:`Config`, with every finding collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdmoe.config.checks import cross_problems
from fsdmoe.config.elastic import fit_mesh
from fsdmoe.config.hf import apply_hf, apply_hf_data, settle_preset
from fsdmoe.config.names_elsewhere import ALIASES
from fsdmoe.config.removed import without_removed_keys, without_removed_options
from fsdmoe.config.schema import SECTIONS, Config
from fsdmoe.config.suggest import FLAGS, suggest, suggest_section
from fsdmoe.config.values import Problems, build_section, parse_override
from fsdmoe.core.errors import ConfigError
from fsdmoe.models.config import ModelConfig, preset_fields
from fsdmoe.models.rope_config import RopeConfig


def build_config(
    mapping: dict[str, Any],
    overrides: Mapping[str, str | None],
    world_size: int,
    problems: Problems,
    *,
    needs_data: bool = True,
) -> Config | None:
    """Compose all sections.

    Args:
        mapping: A table a section, as a TOML file has them; it may come from an earlier version.
        overrides: Values by dotted key, as text of a command line; ``None`` stands for a bare switch.
        world_size: The number of ranks that the configuration is for.
        problems: Gets a line for everything that is wrong.
        needs_data: False for a plan, which says nothing of data, and asks nothing of this machine's devices.

    Returns:
        The configuration; ``None`` when something is wrong.
    """
    config, wrong = compose(mapping, overrides, problems, needs_data=needs_data)
    config = fit_mesh(config, world_size)
    # Nothing is concluded from a default that stands in for a wrong value.
    findings = cross_problems(config, world_size, is_here=needs_data)
    problems.extend(line for keys, line in findings if wrong.isdisjoint(keys))
    return None if problems else config


def compose(
    mapping: dict[str, Any],
    overrides: Mapping[str, str | None],
    problems: Problems,
    *,
    needs_data: bool = True,
    name: str = "",
) -> tuple[Config, set[str]]:
    """All sections, each checked by itself, with defaults in place of what is wrong; and the keys that
    nothing may be concluded from, for that reason. Arguments as of :func:`build_config`; ``name`` of the
    configuration, by default its preset, is that of the run's folder where none is written."""
    values = _tables(without_removed_keys(mapping, SECTIONS, problems), problems)
    _override(values, overrides, problems)
    values["train"].setdefault("output_dir", f"runs/{name or _name_of(values['model'])}")
    if _names_folder(values["model"]):
        settle_preset(values["model"], mapping.get("model"), overrides, problems)
    _apply_preset(values["model"], problems)
    if _names_folder(values["model"]):
        apply_hf_data(values["model"]["hf"], values["data"], problems, needs_data=needs_data)
    built: dict[str, Any] = {
        name: build_section(cls, values[name], name, problems) for name, cls in SECTIONS.items()
    }
    wrong = {line.partition(":")[0] for line in problems}
    for name in [name for name in SECTIONS if built[name] is None]:
        built[name] = SECTIONS[name]()
        wrong.update(f"{name}.{f.name}" for f in dataclasses.fields(SECTIONS[name]))
    return Config(**built), wrong


def override_problems(overrides: Mapping[str, str | None]) -> Problems:
    """What is wrong with options whatever the file says: there are none of these names."""
    problems: Problems = []
    _override(_tables({}, problems), overrides, problems)
    return problems


def _override(
    values: dict[str, dict[str, Any]], overrides: Mapping[str, str | None], problems: Problems
) -> None:
    """Put the options of a command line into the tables of sections."""
    for key, text in without_removed_options(overrides, problems).items():
        section, _, rest = key.partition(".")
        if section not in SECTIONS or not rest:
            problems.append(f"--{key}: unknown option; {suggest(key, FLAGS)}")
        else:
            parse_override(values[section], SECTIONS[section], key, text, problems)


def _tables(mapping: dict[str, Any], problems: Problems) -> dict[str, dict[str, Any]]:
    """A copy of every section's table, empty where there is none."""
    for name in mapping:
        if name not in SECTIONS:
            homes = [s for s, cls in SECTIONS.items() if name in {f.name for f in dataclasses.fields(cls)}]
            fix = f"write it below [{'] or ['.join(homes)}]"
            if not homes:
                table = mapping[name]
                fix = suggest_section(name, table) if isinstance(table, dict) else suggest(name)
            problems.append(f"{name}: unknown section; {fix}")
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name in SECTIONS:
        table = mapping.get(name, {})
        if isinstance(table, dict):
            values[name].update(table)
        else:
            meant = f"did you mean {ALIASES[name]}? Write" if name in ALIASES else "write"
            problems.append(
                f"{name}: expected a table, got {table!r}; {meant} [{name}] and its keys below it"
            )
    return values


def _name_of(model: dict[str, Any]) -> str:
    """What to call a run of this model."""
    return Path(model["hf"]).name if _names_folder(model) else str(model.get("preset", ModelConfig.preset))


def _names_folder(model: dict[str, Any]) -> bool:
    return isinstance(model.get("hf"), str) and model["hf"] != "none"


def _apply_preset(values: dict[str, Any], problems: Problems) -> None:
    if _names_folder(values):
        apply_hf(values, problems)
        return
    preset = values.get("preset", ModelConfig.preset)
    if not isinstance(preset, str):
        return  # a wrong type: reported when the section is built
    try:
        fields = preset_fields(preset)
    except ConfigError as error:
        problems.extend(error.problems)
        return
    for key, value in fields.items():
        written = values.setdefault(key, value)
        # Keys of the preset's own kind of scaling; another kind reads other keys.
        is_table = isinstance(value, RopeConfig) and isinstance(written, dict)
        if is_table and written.get("type", value.type) == value.type:
            values[key] = {"type": value.type, **value.stated, **written}
