"""What somebody wants planned, from the command line or the page, as a checked configuration: a TOML file or
the name of a packaged one, a Hugging Face folder or its config.json, or the name of a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdmoe.config import Config, build_config
from fsdmoe.config.toml import is_packaged, read_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import near_file, nearest
from fsdmoe.experts.config import BalanceConfig
from fsdmoe.models.config import PRESETS
from fsdmoe.plan.memory_section import Parts

DEFAULT_TOKENS = 4 * 2**20
"""In a step, where nobody says."""
MOST_GPUS = 1 << 20

# As the models were balanced, where that is known; see configs/.
_BALANCE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"global_batch": 0.001},
    "mixtral": {"transformers": 0.001},
    "deepseek_v3": {"bias_rate": 0.001, "sequence": 0.0001},
    "glm4_moe": {"bias_rate": 0.001},
}


class Fixed(NamedTuple):
    """What is not to be searched for; None is left to the search."""

    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_outer: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    """Parts with commas between them, or ``none``."""

    def allows(self, **values: int) -> bool:
        """Whether none of these differs from what is fixed."""
        return all(getattr(self, name) in (None, value) for name, value in values.items())

    def parts(self, choices: tuple[Parts, ...]) -> tuple[Parts, ...]:
        """Of the choices of a search, those that are allowed."""
        if self.recompute is None:
            return choices
        wanted = frozenset() if self.recompute == "none" else frozenset(self.recompute.split(","))
        known = {part for each in choices for part in each}
        if not wanted <= known or ("layer" in wanted and len(wanted) > 1):
            raise ConfigError(
                f"--recompute: expected none, layer, or parts of the model with commas between them "
                f"({', '.join(sorted(known - {'layer'}))}), got {self.recompute!r}; choose some of them"
            )
        return (wanted,)


NOTHING_FIXED = Fixed()


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    model: str
    """Path or preset."""
    num_gpus: int
    gpu: str = "h100"
    seq_len: int | None = None
    tokens_per_step: int | None = None
    fabric: str | None = None
    fixed: Fixed = NOTHING_FIXED
    host_memory: int | None = None
    """GiB of the host for each GPU; else what is usual for the GPU."""
    skew: float | None = None
    """What the busiest rank of a layer gets, as a multiple of an even share."""
    loads: str | None = None
    """A recording of routing to take that from."""


@dataclass(frozen=True)
class Reading:
    """A request, read."""

    tables: dict[str, Any]
    """The configuration as far as it is given; the search fills in the rest."""
    config: Config
    """The same with one rank, checked."""


def read_request(request: Request, changes: dict[str, dict[str, Any]] | None = None) -> Reading:
    """Raises ``ConfigError`` with a line for everything that is wrong. ``changes`` are keys, by section, that
    take the place of the model's own."""
    problems = [
        f"--{name}: expected a number from 1 to {most}, got {value}; correct it"
        for name, value, most in (
            ("gpus", request.num_gpus, MOST_GPUS),
            ("seq", request.seq_len, 1 << 30),
            ("tokens-per-step", request.tokens_per_step, 1 << 40),
            ("host-memory", request.host_memory, 1 << 20),
            *(
                (name.replace("_", "-"), value, MOST_GPUS)
                for name, value in request.fixed._asdict().items()
                if name != "recompute"
            ),
        )
        if value is not None and not 1 <= value <= most
    ]
    tables = _read_tables(request.model, problems)
    if problems:
        raise ConfigError(*problems)
    has_batch = request.tokens_per_step is not None or "global_batch_size" in tables.get("train", {})
    has_experts = "experts" in tables
    for section, values in (changes or {}).items():
        tables[section] = {**tables.get(section, {}), **values}
    _apply(request, tables, has_batch=has_batch)
    alone = {**tables, "mesh": {}, "train": {**tables["train"], "micro_batch_size": 1}}
    config = build_config(alone, {}, 1, problems, needs_data=False)
    if config is None:
        raise ConfigError(*problems)
    balance = _BALANCE.get(config.model.architecture)
    if balance is not None and not has_experts and config.model.hf is None:
        tables["experts"] = {**tables.get("experts", {}), "balance": dict(balance)}
        config = replace(config, experts=replace(config.experts, balance=BalanceConfig(**balance)))
    return Reading(tables, config)


def _read_tables(model: str, problems: list[str]) -> dict[str, Any]:
    path = Path(model).expanduser()
    if model in PRESETS and not path.exists():
        return {"model": {"preset": model}}
    if path.is_dir():
        return {"model": {"hf": str(path)}}
    if path.suffix == ".toml" or is_packaged(model):
        tables = read_toml(str(path), problems)
        wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
        problems += [f"{name}: expected a table, got a value; write [{name}]" for name in wrong]
        return tables
    if path.name == "config.json" and path.is_file():
        return {"model": {"hf": str(path.parent)}}
    known = near_file(model) or nearest(model, PRESETS)
    if path.exists():
        known = "give its folder, or call it config.json"
    problems.append(
        "model: expected a .toml file or the name of a packaged one, a Hugging Face folder, a config.json "
        "or a preset, got "
        f"{model!r}; {known}"
    )
    return {}


def _apply(request: Request, tables: dict[str, Any], *, has_batch: bool) -> None:
    """Put the request's own numbers into the tables."""
    data, train = dict(tables.get("data", {})), dict(tables.get("train", {}))
    if request.seq_len is not None:
        data["seq_len"] = request.seq_len
    data.setdefault("seq_len", 4096)
    seq_len = data["seq_len"] if isinstance(data["seq_len"], int) and data["seq_len"] > 0 else 4096
    if request.tokens_per_step is not None or not has_batch:
        tokens = request.tokens_per_step or DEFAULT_TOKENS
        rows = max(1, round(tokens / seq_len))
        if not has_batch:  # whatever the mesh, it can be divided
            rows = max(1, round(rows / request.num_gpus)) * request.num_gpus
        train["global_batch_size"] = rows
    tables["data"], tables["train"] = data, train
