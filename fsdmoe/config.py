"""One configuration from a TOML file and dotted command-line overrides, strictly checked before anything is
built.

Every part declares its own section beside its code; this file only composes them::

    torchrun train.py --config configs/quickstart.toml --mesh.ep 4 --train.steps 50

All findings (unknown keys, wrong types, impossible combinations) are collected and reported together, on
rank 0, as plain lines that name the key and the fix; the exit code is 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.config_attention import attention_problems
from fsdmoe.config_disk import disk_problems
from fsdmoe.config_hf import apply_hf, hf_problems
from fsdmoe.config_reader import Problems, build_section, nearest, parse_override
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.data import DataConfig, SourceConfig
from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import CapacityConfig, ExpertsConfig
from fsdmoe.fsdp.config import FSDPConfig, FSDPPolicy
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models.config import PRESETS, ModelConfig
from fsdmoe.models.moe import router_spec
from fsdmoe.observe.config import ObserveConfig
from fsdmoe.observe.console import suppress_broken_pipe
from fsdmoe.optim.config import OptimConfig
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.tensor_parallel.config import TensorParallelConfig, check_overlap


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 300
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = 4
    """Sequences in one forward of one rank; the rest of the step's share is accumulated."""
    output_dir: str = "runs/quickstart"
    """Folder of this run: metrics, TensorBoard, checkpoints, summary."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    eval_interval: int = 100
    """Steps between evaluations on the held-out slice; 0 evaluates only at the end, -1 never."""
    eval_batches: int = 8
    """Global batches of held-out rows in one evaluation; the same rows whatever the number of ranks."""
    max_skipped_steps: int = 10
    """Steps with a non-finite loss or gradient are skipped; after so many in a row the run stops. Those that
    lower precision.loss_scale do not count."""
    recompute: Literal["none", "norms", "layer"] = "none"
    """What backward recomputes instead of keeping it: nothing, what norms and rotary positions give (a fifth
    of the activations for two to three percent of the time), or whole decoder layers."""
    compile: bool = False
    """Compile each decoder layer's forward with torch.compile."""
    kernels: Literal["auto", "torch"] = "auto"
    """Fused Triton kernels wherever they can run, or plain torch everywhere: to compare, or to rule them
    out."""

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation follows ``step``."""
        return self.eval_interval >= 0 and (
            step == self.steps or (self.eval_interval > 0 and step % self.eval_interval == 0)
        )

    def __post_init__(self) -> None:
        problems = [
            f"train.{key}: expected {low} or more, got {getattr(self, key)}; raise it"
            for key, low in {
                "steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "eval_interval": -1,
                "eval_batches": 1, "max_skipped_steps": 0,
            }.items()
            if getattr(self, key) < low
        ]  # fmt: skip
        if not self.output_dir:
            problems.append("train.output_dir: expected a folder, got an empty string; name one")
        if self.compile and self.recompute == "norms":
            problems.append("train.recompute: norms does nothing in compiled layers; write layer or none")
        if problems:
            raise ConfigError(*problems)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made from, a section a part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class CommandLine:
    """What the command line asked for, beside the configuration itself."""

    config: Config
    dry_run: bool
    world_size: int


USAGE = """usage: torchrun [--nproc-per-node N] train.py [--config FILE.toml] [--section.key VALUE ...]

  --config FILE     TOML file with one table a section
  --section.key V   override one field, for example --mesh.ep 4 --train.steps 50
  --print-config    print the resulting configuration as TOML and exit
  --dry-run         plan memory and communication for this configuration, print them and exit
  --world N         plan for N ranks (with --dry-run or --print-config)
  --help            this text and every field
"""


def load_config(argv: Sequence[str]) -> CommandLine:
    """Parse the command line; prints help, the configuration or all problems and exits where that was asked
    or due."""
    if "--help" in argv or "-h" in argv:
        _print_help()
    problems: Problems = []
    flags, overrides = _split(argv, problems)
    mapping = _read_file(flags.get("--config"), problems)
    world_size = _world_size(flags.get("--world"), problems)
    config = build_config(mapping, overrides, world_size, problems)
    if config is None:
        _exit_with(problems)
    if "--print-config" in flags:
        if _is_main():
            with suppress_broken_pipe():
                print(to_toml(config), end="")
        sys.exit(0)
    if "--dry-run" not in flags:
        found = disk_problems(config.model, config.data, config.train.output_dir, config.checkpoint)
        if found:
            _exit_with(found)
    return CommandLine(config, "--dry-run" in flags, world_size)


def build_config(
    mapping: dict[str, Any], overrides: Mapping[str, str | None], world_size: int, problems: Problems
) -> Config | None:
    """Compose all sections; ``None`` with every finding in ``problems`` when something is wrong."""
    sections: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for name in mapping:
        if name not in sections:
            homes = [s for s, cls in sections.items() if name in {f.name for f in dataclasses.fields(cls)}]
            fix = f"write it below [{'] or ['.join(homes)}]" if homes else nearest(name, sections)
            problems.append(f"{name}: unknown section; {fix}")
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for name in sections:
        table = mapping.get(name, {})
        if isinstance(table, dict):
            values[name].update(table)
        else:
            problems.append(f"{name}: expected a table, got {table!r}; write [{name}] and its keys below it")
    for key, text in overrides.items():
        section, _, rest = key.partition(".")
        if section not in sections or not rest:
            known = [f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls)]
            problems.append(f"--{key}: unknown option; {nearest(key, known)}")
        else:
            parse_override(values[section], sections[section], key, text, problems)
    _apply_preset(values["model"], problems)
    built: dict[str, Any] = {n: build_section(sections[n], values[n], n, problems) for n in sections}
    wrong = {line.partition(":")[0] for line in problems}
    for name in [name for name in sections if built[name] is None]:
        built[name] = sections[name]()
        wrong.update(f"{name}.{f.name}" for f in dataclasses.fields(sections[name]))
    config = Config(**built)
    problems.extend(line for keys, line in cross_problems(config, world_size) if wrong.isdisjoint(keys))
    return None if problems else config


def cross_problems(config: Config, world_size: int) -> list[tuple[tuple[str, ...], str]]:
    """What no section can see alone: each finding with the keys that it follows from."""
    problems: list[tuple[tuple[str, ...], str]] = []
    model, mesh, train = config.model, config.mesh, config.train
    axes = tuple(f"mesh.{axis}" for axis in vars(mesh))
    try:
        resolve_degrees(mesh, world_size)
    except ConfigError as error:
        problems += [(axes, line) for line in error.problems]
    if model.num_experts % mesh.ep:
        line = (
            f"mesh.ep: {model.num_experts} experts cannot be divided over {mesh.ep} ranks; "
            f"choose a divisor of model.num_experts = {model.num_experts}"
        )
        problems.append((("mesh.ep", "model.num_experts", "model.preset"), line))
    if model.moe_intermediate_size % mesh.etp:
        line = (
            f"mesh.etp: an expert of width {model.moe_intermediate_size} cannot be split in {mesh.etp}; "
            f"choose a divisor of model.moe_intermediate_size"
        )
        problems.append((("mesh.etp", "model.moe_intermediate_size", "model.preset"), line))
    with contextlib.suppress(ConfigError):  # reported above
        dense = resolve_degrees(dataclasses.replace(mesh, ep=1, etp=1), world_size)
        ranks = dense.dp_outer * (1 if config.context_parallel.dynamic else dense.dp_shard)
        if train.global_batch_size % (ranks * train.micro_batch_size):
            share, rest = divmod(train.global_batch_size, ranks)
            line = (
                f"train.global_batch_size: {train.global_batch_size} sequences cannot be divided over "
                f"{ranks} data-parallel ranks in micro-batches of {train.micro_batch_size}; choose "
                f"a multiple of {ranks * train.micro_batch_size}"
                + (f", or a divisor of {share} for train.micro_batch_size" if not rest else "")
            )
            problems.append(((*axes[:4], "train.global_batch_size", "train.micro_batch_size"), line))
    problems += attention_problems(config, world_size)
    if model.hf:
        problems += hf_problems(config)
    return problems + _policy_problems(config)


def _policy_problems(config: Config) -> list[tuple[tuple[str, ...], str]]:
    """What the parts would refuse later, once they are built from several sections."""
    problems: list[tuple[tuple[str, ...], str]] = []
    if config.experts.dispatcher == "local" and config.mesh.ep > 1:
        line = (
            f"experts.dispatcher: 'local' expected mesh.ep = 1, got {config.mesh.ep}; "
            "write 'auto', 'allgather' or 'all_to_all'"
        )
        problems.append((("experts.dispatcher", "mesh.ep"), line))
    if config.train.eval_interval >= 0 and not config.data.holdout:
        line = (
            "data.holdout: expected a fraction above 0 to evaluate on, got 0; set it to 0.01, or set "
            "train.eval_interval = -1 to evaluate never"
        )
        problems.append((("data.holdout", "train.eval_interval"), line))
    if config.model.hf and config.train.recompute == "norms":
        line = (
            "train.recompute: norms is for fsdmoe's own decoders, and model.hf is not one of them; choose "
            "layer, or none"
        )
        problems.append((("train.recompute", "model.hf"), line))
    tensor, model = config.tensor_parallel, config.model
    of_model = tuple(f"model.{f.name}" for f in dataclasses.fields(model))
    checks: dict[tuple[str, ...], Callable[[], object]] = {
        ("tensor_parallel.overlap", "train.compile"):
            lambda: check_overlap(tensor, compiled=config.train.compile),
        of_model: lambda: router_spec(model),
        ("fsdp.grad_exchange", "precision.reduce_dtype"):
            lambda: FSDPPolicy(fsdp=config.fsdp, precision=config.precision),
    }  # fmt: skip
    for keys, check in checks.items():
        try:
            check()
        except ConfigError as error:
            problems += [(keys, line) for line in error.problems]
    return problems


def to_toml(config: Config) -> str:
    """The configuration as TOML that reads back to the same; a field that is none is written ``"none"``."""
    import tomli_w  # here, because a run that prints no configuration needs none of it

    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def _without_none(value: Any) -> Any:
    """``value`` with ``"none"`` for what TOML has no word for."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_none(inner) for inner in value]
    return "none" if value is None else value


def _apply_preset(values: dict[str, Any], problems: Problems) -> None:
    if isinstance(values.get("hf"), str) and values["hf"] != "none":
        apply_hf(values, problems)
        return
    preset = values.get("preset", ModelConfig.preset)
    if not isinstance(preset, str):
        return  # a wrong type: reported when the section is built
    if preset not in PRESETS:
        problems.append(f"model.preset: unknown preset {preset!r}; {nearest(preset, PRESETS)}")
        return
    for key, value in PRESETS[preset].items():
        values.setdefault(key, value)


def _split(argv: Sequence[str], problems: Problems) -> tuple[dict[str, str], dict[str, str | None]]:
    """Flags and dotted overrides, both ``--key value`` and ``--key=value``; a key without a value has
    none."""
    takes_value, bare = {"--config", "--world"}, {"--print-config", "--dry-run"}
    flags: dict[str, str] = {}
    overrides: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--"):
            problems.append(f"{key}: expected an option that starts with --, got a bare word; see --help")
            continue
        if key in bare:
            flags[key] = ""
            continue
        given: str | None = value
        if not equals:
            given = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if key not in takes_value:
            overrides[key[2:]] = given
        elif given is None:
            problems.append(f"{key}: expected a value after it, got none; write {key} VALUE")
        else:
            flags[key] = given
    if "--world" in flags and bare.isdisjoint(flags):
        problems.append(
            "--world: only plans, got a run; add --dry-run, or start that many ranks with torchrun"
        )
    return flags, overrides


def _read_file(path: str | None, problems: Problems) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"--config: no file at {path!r}; see configs/ for examples")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        problems.append(f"--config: {path!r} is not readable as TOML: {error}; fix that line")
    return {}


def _world_size(text: str | None, problems: Problems) -> int:
    name, fix = "--world", "write --world 64"
    if text is None:
        name, fix = "WORLD_SIZE", "unset it, or start with torchrun"
        text = os.environ.get(name, "1")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(f"{name}: expected a positive number of ranks, got {text!r}; {fix}")
    return 1


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _exit_with(problems: Problems) -> NoReturn:
    if _is_main():
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        lines = (f"  {line}" for line in problems)
        print(f"fsdmoe: {count} in the configuration:", *lines, sep="\n", file=sys.stderr)
    sys.exit(2)


def _print_help() -> NoReturn:
    if _is_main():
        import tyro  # the help formatter serves nothing else, and importing it takes long

        plain = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
        shown = Config(  # a table that is none has no fields to document
            experts=ExpertsConfig(capacity=CapacityConfig()),
            data=DataConfig(sources=(SourceConfig(kind="python-stdlib"),)),
        )
        with suppress_broken_pipe():
            print(USAGE)
            tyro.cli(
                Config, default=shown, args=["--help"], prog="train.py", use_underscores=True, config=plain
            )
    sys.exit(0)
