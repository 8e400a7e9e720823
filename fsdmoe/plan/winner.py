"""A candidate as a configuration: the tables that somebody gave, with what the search chose."""

from __future__ import annotations

from typing import Any

from fsdmoe.config import Config, build_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.plan.estimate import Estimate
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.memory_section import section_table
from fsdmoe.plan.search import Candidate, Ranking
from fsdmoe.plan.source import Reading, Request

_AXES = ("dp_outer", "cp", "tp", "ep", "etp")


def tables_of(candidate: Candidate, wanted: Reading) -> dict[str, Any]:
    """All tables of the configuration; what is at its default is not written."""
    setting = candidate.setting
    degrees, fsdp, optim = setting.degrees, setting.fsdp, setting.optim
    tables = {name: dict(table) for name, table in wanted.tables.items()}
    tables["mesh"] = {axis: size for axis in _AXES if (size := getattr(degrees, axis)) > 1}
    _set(tables, "fsdp", {"lean": fsdp.lean, "cpu_offload": fsdp.cpu_offload}, wanted.config.fsdp)
    overlap = {key: getattr(setting.experts, key) for key in ("chunks", "sub_batches", "clones")}
    _set(tables, "experts", overlap, wanted.config.experts)
    _set(tables, "optim", {"moment_dtype": optim.moment_dtype}, wanted.config.optim)
    tables["train"] |= {"micro_batch_size": setting.micro_batch_size}
    tables["memory"] = section_table(setting.memory)
    return {name: table for name, table in tables.items() if table}


def _set(tables: dict[str, Any], section: str, chosen: dict[str, Any], before: Any) -> None:
    changed = {key: value for key, value in chosen.items() if value != getattr(before, key)}
    if changed:
        tables[section] = {**tables.get(section, {}), **changed}


def check(tables: dict[str, Any], num_gpus: int) -> Config:
    """The tables as ``train.py --dry-run`` would read them."""
    problems: list[str] = []
    config = build_config(tables, {}, num_gpus, problems, needs_data=False)
    if config is None:
        raise ConfigError(*problems)
    return config


def _speed(found: Estimate) -> str:
    if found.why_no_price:
        return f"no time ({found.why_no_price})"
    rate = f"{found.tokens_per_second:,.0f} tokens/s, {found.tflops:.0f} model TFLOP/s a GPU"
    return f"{rate}, {found.time.total:.3g} s a step"


def toml_text(candidate: Candidate, wanted: Reading, request: Request, ranking: Ranking) -> str:
    """A file for ``train.py``, with what was predicted for it on top."""
    import tomli_w  # here, because a plan that writes no file needs none of it

    found = candidate.found
    place = 1 + ranking.candidates.index(candidate)
    missing = [key for key in ("kind", "path") if key not in wanted.tables["data"]]
    lines = [
        f"Planned for {request.num_gpus} x {request.gpu}: number {place} of {len(ranking.candidates)} "
        f"meshes that fit, {ranking.num_settings:,} settings tried.",
        f"Predicted: {found.memory.total / GIB:.1f} of {ranking.gpu.memory / GIB:.1f} GiB, {_speed(found)}.",
        "  python train.py --config THIS.toml --dry-run "
        f"{'--files-elsewhere ' if missing else ''}--world {request.num_gpus} --gpu {request.gpu}",
    ]
    if missing:
        lines.append("Add what to train on: data.kind, data.path and data.tokenizer (docs/data.md).")
    head = "".join(f"# {line}\n" for line in lines)
    return head + "\n" + tomli_w.dumps(tables_of(candidate, wanted))
