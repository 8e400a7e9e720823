"""``python -m fsdmoe.checkpoint COMMAND``: looks at checkpoints and converts them; with torchrun too."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from fsdmoe.checkpoint.adapter_export import Layout, to_adapter
from fsdmoe.checkpoint.adapter_merge import MergePolicy, merge_adapter
from fsdmoe.checkpoint.agree import from_first, together
from fsdmoe.checkpoint.catalog import all_entries, require, retain
from fsdmoe.checkpoint.compare import differences
from fsdmoe.checkpoint.dcp_export import DCPExportPolicy, to_dcp
from fsdmoe.checkpoint.dcp_import import DCPImportPolicy, from_dcp
from fsdmoe.checkpoint.dcp_names import Family, parse_rule
from fsdmoe.checkpoint.deployed import read_roundings
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import Index
from fsdmoe.checkpoint.hf_config import model_fields
from fsdmoe.checkpoint.hf_export import DEFAULT_SHARD_BYTES, ExportPolicy, to_hf
from fsdmoe.checkpoint.hf_folder import CONFIG
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.checkpoint.hf_understood import not_understood
from fsdmoe.checkpoint.reader import check_sizes, open_checkpoint
from fsdmoe.checkpoint.session import open_newest, open_verified
from fsdmoe.checkpoint.storage import Storage, open_storage
from fsdmoe.checkpoint.tables import (
    about_line,
    folder_table,
    progress_bar,
    section_table,
    table,
    tensor_table,
)
from fsdmoe.checkpoint.tree import SEPARATOR, Tree
from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.failures import own_rank
from fsdmoe.core.hush import hush_libraries
from fsdmoe.core.rules import nearest
from fsdmoe.run.lock import RunLock

_PIPE_WIDTH = 1000
_FOUND = ("path", "a checkpoint, or a run's folder (then its newest)")
_OUT = ("out", "folder to make")
_Add = Callable[..., argparse.ArgumentParser]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when all is well, 1 when it cannot be done, 2 for a wrong command line."""
    program = "python -m fsdmoe.checkpoint" if arguments is None else "fsdmoe checkpoint"
    parser, commands = _parser(program)
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-") and words[0] not in commands:
        found = nearest(words[0], commands)
        print(f"{program}: {words[0]}: expected a command, got another word; {found}", file=sys.stderr)
        return 2
    options = parser.parse_args(words)
    hush_libraries()
    console = Console(
        quiet=own_rank() != 0,
        # In a file or a pipe a row is a line, however long, so that names can be searched for.
        width=None if sys.stdout.isatty() else _PIPE_WIDTH,
        soft_wrap=True,
        # Folders and tensors may be called [bold] or :smile:.
        markup=False,
        emoji=False,
    )
    try:
        with _ranks():
            return options.run(options, console)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


def _parser(program: str) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the commands."""
    parser = argparse.ArgumentParser(prog=program, description="Look at checkpoints and convert them.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[..., int], text: str, *paths: tuple[str, str]
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        for path, meaning in paths:
            command.add_argument(path, help=meaning)
        return command

    _add_looking_commands(add)
    _add_hf_commands(add)
    _add_adapter_commands(add)
    _add_dcp_commands(add)
    _add_upcycling_command(add)
    return parser, list(commands.choices)


def _add_looking_commands(add: _Add) -> None:
    command = add("inspect", _inspect, "What a checkpoint holds, and what there is in a folder.", _FOUND)
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    add("verify", _verify, "Check every byte against its checksum.", _FOUND)
    inside = ("path", "a run's folder, or its folder of checkpoints")
    add("list", _list, "The checkpoints of a folder, the newest first, with their sizes.", inside)
    command = add("prune", _prune, "Delete old checkpoints; the newest stays.", inside)
    command.add_argument("--keep-last", type=int, required=True, help="newest ones to keep")
    command.add_argument("--keep-every", type=int, default=0, help="also keep steps divisible by this")
    second = ("second", "another checkpoint, or a run's folder")
    command = add("diff", _diff, "What differs between two checkpoints; 1 if anything does.", _FOUND, second)
    command.add_argument("--most", type=int, default=20, help="tensors to list")
    command.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="compare tensors with matching names alone: 'model/*', '*lora_B*'; may be repeated",
    )  # fmt: skip


def _add_hf_commands(add: _Add) -> None:
    command = add("to-hf", _to_hf, "Write the model as a Hugging Face folder.", _FOUND, _OUT)
    command.add_argument(
        "--dtype", choices=_DTYPES, help="of the weights; default: what the model's config says"
    )
    command.add_argument("--fp8", action="store_true", help="projections in DeepSeek-V3's blockwise FP8")
    command.add_argument("--ema", action="store_true", help="the averaged weights (optim.ema)")
    command.add_argument(
        "--config-from", help="Hugging Face folder with config.json and tokenizer files to copy"
    )
    _add_folder_options(command)
    command = add(
        "from-hf", _from_hf, "Make a checkpoint from a Hugging Face folder; FP8 becomes bf16.",
        ("source", "folder with config.json and safetensors"), ("out", "checkpoint to make"),
    )  # fmt: skip
    command.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: as they are")
    command.add_argument(
        "--for-transformers",
        action="store_true",
        help="also a model that the native decoder does not compute (sinks, say), to load with model.hf",
    )


def _add_adapter_commands(add: _Add) -> None:
    command = add(
        "to-adapter", _to_adapter, "Write the adapter (LoRA, DoRA) of a run as a folder.", _FOUND, _OUT
    )
    command.add_argument("--adapter", default="default", help="its name in the model")
    command.add_argument(
        "--layout", choices=get_args(Layout), default="peft", help="of experts; servers: per_expert"
    )
    command.add_argument("--replace", action="store_true", help="an earlier adapter in that folder")
    command = add(
        "merge-adapter", _merge_adapter, "Write a Hugging Face folder with an adapter in its weights.",
        ("base", "Hugging Face folder that the adapter was trained on"),
        ("source", "the adapter: a folder of peft or to-adapter, a checkpoint, or a run's folder"), _OUT,
    )  # fmt: skip
    command.add_argument("--adapter", default="default", help="its name in the model, of a checkpoint")
    command.add_argument(
        "--any-base", action="store_true", help="also if the adapter's configuration names another base"
    )
    command.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: those of the base")
    command.add_argument("--requantise", action="store_true", help="write a base in FP8 as FP8 again")
    _add_folder_options(command)


def _add_folder_options(command: argparse.ArgumentParser) -> None:
    """Of what writes a Hugging Face folder."""
    command.add_argument(
        "--shard-size", type=float, default=DEFAULT_SHARD_BYTES / 1e9, help="largest file, in GB"
    )
    command.add_argument("--replace", action="store_true", help="an earlier export in that folder")


def _add_dcp_commands(add: _Add) -> None:
    command = add(
        "from-dcp", _from_dcp, "Make a checkpoint from a folder of torch.distributed.checkpoint.",
        ("source", "folder with .metadata and *.distcp"), ("out", "checkpoint to make"),
    )  # fmt: skip
    command.add_argument(
        "--family", choices=get_args(Family), help="whose torchtitan names they are; default: told by them"
    )
    command.add_argument(
        "--config-from", help="Hugging Face folder of the same model, whose config.json is kept"
    )
    command.add_argument("--step", type=int, help="of the run; default: the one that was saved")
    _add_dcp_options(command)
    command = add(
        "to-dcp", _to_dcp, "Write a checkpoint as a folder of torch.distributed.checkpoint, for FSDP2.",
        _FOUND, _OUT,
    )  # fmt: skip
    command.add_argument("--model-key", default="model", help="key of the model's state; empty: bare names")
    command.add_argument("--optimizer-key", default="optim", help="key of the optimizer's state")
    command.add_argument(
        "--flat-optimizer", action="store_true", help="as flatten_optimizer_state_dict=True reads it"
    )
    command.add_argument(
        "--one-group", action="store_true", help="all parameters in one group, decayed alike"
    )
    _add_dcp_options(command)


def _add_dcp_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--map", action="append", default=[], metavar="REGEX=NAME",
        help="rename parameters that match as a whole; an empty NAME leaves them out; may be repeated",
    )  # fmt: skip
    command.add_argument("--only-model", action="store_true", help="without the optimizer's state")


def _add_upcycling_command(add: _Add) -> None:
    command = add(
        "upcycle", _upcycle, "Make a mixture of experts from a dense Hugging Face model.",
        ("source", "folder of a dense model"), ("out", "checkpoint to make"),
    )  # fmt: skip
    command.add_argument("--groups", type=int, required=True, help="E: copies of each dense MLP")
    command.add_argument(
        "--granularity", type=int, default=1, help="G: experts that one dense MLP is cut into"
    )
    command.add_argument(
        "--top-k", type=int, required=True, help="T: experts that a token visits; a multiple of G"
    )
    command.add_argument("--seed", type=int, default=0, help="of the router")
    command.add_argument(
        "--inexact", action="store_true", help="allow shapes that differ from the dense model at first"
    )


@contextlib.contextmanager
def _ranks() -> Iterator[None]:
    """Join the other ranks when torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _inspect(options: argparse.Namespace, console: Console) -> int:
    root, names, explicit = together(lambda: require(options.path))
    storage = open_storage(root)
    if not explicit:
        console.print(folder_table(storage))
    index = together(lambda: open_verified(storage, names[0], "fast"))
    console.print(Text(names[0], style="bold"), about_line(index))
    console.print(section_table(index))
    if options.tensors:
        console.print(tensor_table(index))
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    began = time.perf_counter()
    reader = open_newest(options.path, verify="full")
    seconds = time.perf_counter() - began
    files = reader.index.files.values()
    if reader.index.is_foreign:
        console.print(f"{reader.name}: headers and sizes are right; a Hugging Face folder has no checksums")
    else:
        size = decimal(sum(record.num_bytes for record in files))
        console.print(f"{reader.name}: {len(files)} files, {size}, every block is right ({seconds:.1f} s)")
    return 0


def _list(options: argparse.Namespace, console: Console) -> int:
    root, _, _ = together(lambda: require(options.path))
    storage = open_storage(root)
    rows = []
    for name, index in _looked_at(storage).items():
        if isinstance(index, DamagedCheckpointError):
            rows.append((name, "damaged", f"{index.file}: {index.why}"))
            continue
        size = decimal(sum(file.num_bytes for file in index.files.values()))
        rows.append((name, size, str(index.about.get("written", ""))))
    console.print(table(("checkpoint", "size", "written"), rows, root))
    return 0


def _looked_at(storage: Storage) -> dict[str, Index | DamagedCheckpointError]:
    """The checkpoints of a folder by name, the newest first; of one that lacks a file, or has one of another
    size, what is wrong with it."""
    found: dict[str, Index | DamagedCheckpointError] = {}
    for entry in all_entries(storage):
        try:
            index = found[entry.name] = open_checkpoint(storage, entry.name)
            check_sizes(storage, entry.name, index)
        except DamagedCheckpointError as error:
            found[entry.name] = error
    return found


def _prune(options: argparse.Namespace, console: Console) -> int:
    if options.keep_last < 1:
        raise ConfigError(f"--keep-last: expected 1 or more, got {options.keep_last}; the newest stays")
    root, _, is_one = together(lambda: require(options.path))
    if is_one:
        raise ConfigError(
            f"{options.path}: expected a folder of checkpoints, got one checkpoint; name its folder"
        )
    storage = open_storage(root)
    if holder := from_first(lambda: _run_of(root)):
        console.print(f"{root}: {holder}, holds this folder and may be running; it goes on saving here")
    damaged = from_first(
        lambda: [n for n, index in _looked_at(storage).items() if isinstance(index, DamagedCheckpointError)]
    )
    gone = from_first(lambda: retain(storage, options.keep_last, options.keep_every, damaged))
    kept = [entry.name for entry in all_entries(storage)]
    console.print(f"{root}: deleted {', '.join(gone) or 'nothing'}; kept {', '.join(kept)}")
    if damaged:
        console.print(f"{root}: damaged, so neither counted nor deleted: {', '.join(damaged)}")
    return 0


def _run_of(root: str) -> str:
    """The run that holds the folder of checkpoints, or the run's folder around it; empty without one."""
    if "://" in root:  # an object store has no locks
        return ""
    folder = Path(os.path.abspath(root))  # of "." and "..", pathlib has other parents
    found = (RunLock(held).holder() for held in (folder, folder.parent))
    return next((str(holder) for holder in found if holder is not None), "")


def _diff(options: argparse.Namespace, console: Console) -> int:
    first = open_newest(options.path)
    second = open_newest(options.second)
    found, num_equal = differences(first, second, options.only)
    counters = [each for each in found if each.is_counter]
    shown = [(each.name, each.text) for each in found if not each.is_counter][: options.most]
    if shown:
        console.print(table(("tensor", "differs"), shown, f"{first.name} and {second.name}"))
    console.print(f"{len(found)} tensors differ, {num_equal} are the same")
    if counters:
        largest = max(each.largest for each in counters)
        console.print(
            f"{len(counters)} of them single numbers that are no weights, apart by at most {largest:g}: "
            f"{counters[0].name}{' and others' * (len(counters) > 1)}"
        )
    return int(bool(found))


def _to_hf(options: argparse.Namespace, console: Console) -> int:
    reader = open_newest(options.path)
    policy = ExportPolicy(
        dtype=_DTYPES.get(options.dtype), fp8=options.fp8, shard_bytes=int(options.shard_size * 1e9),
        config=_config_of(options.config_from), files_from=options.config_from, ema=options.ema,
        replace=options.replace,
    )  # fmt: skip
    total = sum(t.num_bytes for key, t in reader.index.tensors.items() if key.startswith(f"model{SEPARATOR}"))
    with progress_bar(console, f"{reader.name} to {options.out}", total) as step:
        tokenizer = to_hf(options.path, options.out, policy, progress=step)
    if tokenizer is None:
        name = ((reader.index.about.get("run") or {}).get("data") or {}).get("tokenizer")
        fix = (
            "the run's is not at hand; copy one there, or export to another folder with --config-from FOLDER"
        )
        why = "the run's is bytes, which has no files" if name == "bytes" else fix
        console.print(f"no tokenizer was written: {why}")
    else:
        console.print(f"tokenizer files copied from {tokenizer}")
    if (rounded := read_roundings(reader.index.about)) is not None:
        console.print(f"{len(rounded.names)} weights are in {rounded.format}, which they were trained for")
    console.print(f"{options.out}: load it with transformers.AutoModelForCausalLM.from_pretrained")
    return 0


def _to_adapter(options: argparse.Namespace, console: Console) -> int:
    to_adapter(
        options.path,
        options.out,
        adapter=options.adapter,
        layout=options.layout,
        replace=options.replace,
    )
    readers = {"peft": "peft.PeftModel.from_pretrained(model, ...)", "per_expert": "vLLM or SGLang"}
    console.print(f"{options.out}: load it with {readers[options.layout]}")
    return 0


def _merge_adapter(options: argparse.Namespace, console: Console) -> int:
    policy = MergePolicy(
        any_base=options.any_base, dtype=_DTYPES.get(options.dtype), requantise=options.requantise,
        replace=options.replace, shard_bytes=int(options.shard_size * 1e9),
    )  # fmt: skip
    with progress_bar(console, f"{options.source} into {options.out}", None) as step:
        merge_adapter(options.base, options.source, options.out, policy, name=options.adapter, progress=step)
    console.print(f"{options.out}: load it with transformers.AutoModelForCausalLM.from_pretrained")
    return 0


def _config_of(folder: str | None) -> Tree | None:
    return json.loads((Path(folder) / CONFIG).read_text()) if folder else None


def _from_hf(options: argparse.Namespace, console: Console) -> int:
    with progress_bar(console, f"{options.source} to {options.out}", None) as step:
        from_hf(
            options.source,
            options.out,
            dtype=_DTYPES.get(options.dtype),
            for_transformers=options.for_transformers,
            progress=step,
        )
    if options.for_transformers:
        console.print(
            f"{options.out}: load it with --checkpoint.load {options.out} --checkpoint.load_only_model true "
            f"--model.hf {options.source}"
        )
        return 0
    return _converted(options.out, console)


def _from_dcp(options: argparse.Namespace, console: Console) -> int:
    policy = DCPImportPolicy(
        rules=[parse_rule(rule) for rule in options.map], family=options.family, step=options.step,
        config=_config_of(options.config_from), only_model=options.only_model,
    )  # fmt: skip
    with progress_bar(console, f"{options.source} to {options.out}", None) as step:
        from_dcp(options.source, options.out, policy, progress=step)
    return _converted(options.out, console)


def _to_dcp(options: argparse.Namespace, console: Console) -> int:
    reader = open_newest(options.path)
    policy = DCPExportPolicy(
        rules=[parse_rule(rule) for rule in options.map], model_key=options.model_key,
        optimizer_key=options.optimizer_key, flat_optimizer=options.flat_optimizer,
        one_group=options.one_group, only_model=options.only_model,
    )  # fmt: skip
    total = sum(t.num_bytes for t in reader.index.tensors.values())
    with progress_bar(console, f"{reader.name} to {options.out}", total) as step:
        to_dcp(options.path, options.out, policy, progress=step)
    console.print(f"{options.out}: load it with dcp.load into what get_state_dict returns")
    return 0


def _upcycle(options: argparse.Namespace, console: Console) -> int:
    policy = UpcyclePolicy(
        groups=options.groups, granularity=options.granularity, top_k=options.top_k, seed=options.seed,
        exact=not options.inexact,
    )  # fmt: skip
    with progress_bar(console, f"{options.source} to {options.out}", None) as step:
        upcycle(options.source, options.out, policy, progress=step)
    return _converted(options.out, console)


def _converted(path: str, console: Console) -> int:
    index = open_newest(path).index
    console.print(section_table(index))
    only_model = "" if "optimizer" in index.values else " --checkpoint.load_only_model true"
    console.print(f"To train from it: --checkpoint.load {path}{only_model}")
    config = index.about.get("hf_config")
    if config is None or not_understood(config):
        return 0
    console.print("\n[model]")
    fields = model_fields(config)
    rope = fields.pop("rope")
    for key, value in fields.items():
        if value is not None:
            console.print(f"{key} = {json.dumps(value)}")
    if rope.type != "default":
        console.print("\n[model.rope]")
        for key, value in {"type": rope.type, **rope.stated}.items():
            console.print(f"{key} = {json.dumps(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
