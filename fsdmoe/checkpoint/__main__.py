"""``python -m fsdmoe.checkpoint COMMAND``: looks at checkpoints and converts them; with torchrun too.

Each command is a function: its arguments are the command's, and its docstring is the help.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fsdmoe.checkpoint.adapter_export import Layout, to_adapter
from fsdmoe.checkpoint.adapter_merge import merge_adapter
from fsdmoe.checkpoint.agree import together, world
from fsdmoe.checkpoint.catalog import entries, require
from fsdmoe.checkpoint.dcp_export import DCPExportPolicy, to_dcp
from fsdmoe.checkpoint.dcp_import import DCPImportPolicy, from_dcp
from fsdmoe.checkpoint.dcp_names import Family, parse_rule
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index
from fsdmoe.checkpoint.hf_config import model_fields
from fsdmoe.checkpoint.hf_export import DEFAULT_SHARD_BYTES, ExportPolicy, to_hf
from fsdmoe.checkpoint.hf_folder import CONFIG
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.checkpoint.hf_understood import not_understood
from fsdmoe.checkpoint.session import open_newest, open_verified
from fsdmoe.checkpoint.storage import Storage, open_storage
from fsdmoe.checkpoint.tree import SEPARATOR, Tree
from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle
from fsdmoe.errors import ConfigError
from fsdmoe.failures import own_rank

Dtype = Literal["float32", "bfloat16", "float16"]
Found = Annotated[
    str, tyro.conf.arg(metavar="PATH", help="a checkpoint, or a run's folder (then its newest)")
]
Source = Annotated[str, tyro.conf.arg(metavar="SOURCE")]
Out = Annotated[str, tyro.conf.arg(metavar="OUT", help="folder to make")]
Rules = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(
        metavar="REGEX=NAME",
        help="rename parameters that match as a whole; an empty NAME leaves them out",
    ),
]
OnlyModel = Annotated[bool, tyro.conf.arg(help="without the optimizer's state")]
_GB = 1e9
_IN_TRANSFORMERS = "load it with transformers.AutoModelForCausalLM.from_pretrained"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when all is well, 1 when it cannot be done, 2 for a wrong command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[..., None]] = {
        "inspect": _inspect, "verify": _verify, "to-hf": _to_hf, "from-hf": _from_hf,
        "to-adapter": _to_adapter, "merge-adapter": _merge_adapter, "from-dcp": _from_dcp, "to-dcp": _to_dcp,
        "upcycle": _upcycle,
    }  # fmt: skip
    try:
        with _ranks():
            tyro.extras.subcommand_cli_from_dict(
                commands,
                args=given,
                prog="python -m fsdmoe.checkpoint",
                description="Look at checkpoints and convert them.",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"{given[0]}: {error}", file=sys.stderr)
        return 1
    return 0


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


def _console() -> Console:
    """What the first rank says."""
    return Console(quiet=own_rank() != 0)


def _inspect(path: Found, /, *, tensors: bool = False) -> None:
    """What a checkpoint holds, and what there is in a folder.

    Args:
        tensors: list every tensor
    """
    root, names, explicit = together(lambda: require(path))
    storage = open_storage(root)
    console = _console()
    if not explicit:
        console.print(_folder_table(storage))
    index = together(lambda: open_verified(storage, names[0], "fast"))
    console.print(f"[bold]{names[0]}[/bold]", _about_line(index))
    console.print(_section_table(index))
    if tensors:
        console.print(_tensor_table(index))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _folder_table(storage: Storage) -> Table:
    pointed = storage.pointed_at()
    rows = [
        (
            entry.name,
            str(entry.step) if entry.step >= 0 else "",
            f"#{entry.serial}" if entry.serial else "unreadable",
            "<-" if entry.name == pointed else "",
        )
        for entry in entries(storage)
    ]
    return _table(("checkpoint", "step", "finished as", "latest"), rows, storage.root)


def _about_line(index: Index) -> str:
    about = index.about
    layout = ", ".join(f"{key} {size}" for key, size in (about.get("layout") or {}).items() if size != 1)
    facts = [
        f"step {about['step']}" if "step" in about else "",
        f"written {about['written']}" if "written" in about else "",
        f"by {about['ranks']} ranks" if "ranks" in about else "",
        f"({layout})" if layout else "",
        f"torch {about['torch']}" if "torch" in about else "",
    ]
    return " ".join(fact for fact in facts if fact)


def _section_table(index: Index) -> Table:
    table = Table(show_footer=True)
    rows: dict[str, list[int]] = {}
    for name, tensor in index.tensors.items():
        row = rows.setdefault(name.split(SEPARATOR, 1)[0], [0, 0, 0, 0])
        for place, amount in enumerate((1, math.prod(tensor.shape), tensor.num_bytes, len(tensor.boxes))):
            row[place] += amount
    values = {key: len(json.dumps(value)) for key, value in index.values.items()}
    totals = [sum(row[place] for row in rows.values()) for place in range(4)]
    footers = ["total", str(totals[0]), f"{totals[1]:,}", decimal(totals[2]), str(totals[3]), ""]
    headings = ("section", "tensors", "elements", "size", "boxes", "plain values")
    for heading, footer in zip(headings, footers, strict=True):
        table.add_column(heading, footer=footer, justify="left" if heading == "section" else "right")
    for key in sorted({*rows, *values}):
        count, elements, num_bytes, boxes = rows.get(key, [0, 0, 0, 0])
        plain = decimal(values[key]) if key in values else ""
        table.add_row(key, str(count), f"{elements:,}", decimal(num_bytes), str(boxes), plain)
    return table


def _tensor_table(index: Index) -> Table:
    rows = [
        (
            name,
            str(tensor.dtype).removeprefix("torch."),
            str(list(tensor.shape)),
            decimal(tensor.num_bytes),
            str(len(tensor.boxes)),
            str(len({box.file for box in tensor.boxes})),
        )
        for name, tensor in index.tensors.items()
    ]
    return _table(("tensor", "dtype", "shape", "size", "boxes", "files"), rows)


def _verify(path: Found, /) -> None:
    """Check every byte against its checksum."""
    root, names, _ = together(lambda: require(path))
    storage = open_storage(root)
    began = time.perf_counter()
    index = together(lambda: open_verified(storage, names[0], "full"))
    total = sum(record.num_bytes for record in index.files.values())
    seconds = time.perf_counter() - began
    found = f"{len(index.files)} files, {decimal(total)}, every block is right ({seconds:.1f} s)"
    if index.is_foreign:
        found = "headers and sizes are right; a Hugging Face folder has no checksums"
    _console().print(f"{names[0]}: {found}")


def _to_hf(
    path: Found,
    out: Out,
    /,
    *,
    dtype: Dtype | None = None,
    fp8: bool = False,
    shard_size: float = DEFAULT_SHARD_BYTES / _GB,
    config_from: str | None = None,
) -> None:
    """Write the model as a Hugging Face folder.

    Args:
        dtype: of the weights; default: what the model's config says
        fp8: projections in DeepSeek-V3's blockwise FP8
        shard_size: largest file, in GB
        config_from: Hugging Face folder with config.json and tokenizer files to copy
    """
    reader = open_newest(path)
    policy = ExportPolicy(
        dtype=_torch_dtype(dtype), fp8=fp8, shard_bytes=int(shard_size * _GB),
        config=_config_of(config_from), files_from=config_from,
    )  # fmt: skip
    total = sum(t.num_bytes for key, t in reader.index.tensors.items() if key.startswith(f"model{SEPARATOR}"))
    with _bar(f"{reader.name} to {out}", total) as step:
        tokenizer = to_hf(path, out, policy, progress=step)
    if tokenizer is None:
        _console().print(
            "no tokenizer was written, since the run's is not at hand; --config-from FOLDER copies one"
        )
    else:
        _console().print(f"tokenizer files copied from {tokenizer}", markup=False)
    _console().print(f"{out}: {_IN_TRANSFORMERS}")


def _to_adapter(path: Found, out: Out, /, *, adapter: str = "default", layout: Layout = "peft") -> None:
    """Write the adapter (LoRA, DoRA) of a run as a folder.

    Args:
        adapter: its name in the model
        layout: of experts; servers: per_expert
    """
    to_adapter(path, out, adapter=adapter, layout=layout)
    readers = {"peft": "peft.PeftModel.from_pretrained(model, ...)", "per_expert": "vLLM or SGLang"}
    _console().print(f"{out}: load it with {readers[layout]}")


def _merge_adapter(
    base: Annotated[str, tyro.conf.arg(metavar="BASE")],
    source: Source,
    out: Out,
    /,
    *,
    adapter: str = "default",
    dtype: Dtype | None = None,
    shard_size: float = DEFAULT_SHARD_BYTES / _GB,
) -> None:
    """Write a Hugging Face folder with an adapter in its weights.

    Args:
        base: Hugging Face folder that the adapter was trained on
        source: the adapter: a folder of peft or to-adapter, a checkpoint, or a run's folder
        adapter: its name in the model, of a checkpoint
        dtype: of the weights; default: those of the base
        shard_size: largest file, in GB
    """
    size = int(shard_size * _GB)
    with _bar(f"{source} into {out}") as step:
        merge_adapter(
            base, source, out, name=adapter, dtype=_torch_dtype(dtype), shard_bytes=size, progress=step
        )
    _console().print(f"{out}: {_IN_TRANSFORMERS}")


def _from_hf(
    source: Source, out: Out, /, *, dtype: Dtype | None = None, for_transformers: bool = False
) -> None:
    """Make a checkpoint from a Hugging Face folder; FP8 becomes bf16.

    Args:
        source: folder with config.json and safetensors
        dtype: of the weights; default: as they are
        for_transformers: also a model that the native decoder does not compute (sinks, say), to load with
            model.hf
    """
    with _bar(f"{source} to {out}") as step:
        from_hf(source, out, dtype=_torch_dtype(dtype), for_transformers=for_transformers, progress=step)
    if for_transformers:
        _console().print(
            f"{out}: load it with --checkpoint.load {out} --checkpoint.load_only_model true "
            f"--model.hf {source}",
            markup=False,
        )
    else:
        _print_converted(out)


def _from_dcp(
    source: Source,
    out: Out,
    /,
    *,
    family: Family | None = None,
    config_from: str | None = None,
    step: int | None = None,
    map: Rules = (),
    only_model: OnlyModel = False,
) -> None:
    """Make a checkpoint from a folder of torch.distributed.checkpoint.

    Args:
        source: folder with .metadata and *.distcp
        family: whose torchtitan names they are; default: told by them
        config_from: Hugging Face folder of the same model, whose config.json is kept
        step: of the run; default: the one that was saved
    """
    policy = DCPImportPolicy(
        rules=[parse_rule(rule) for rule in map], family=family, step=step, config=_config_of(config_from),
        only_model=only_model,
    )  # fmt: skip
    with _bar(f"{source} to {out}") as progress:
        from_dcp(source, out, policy, progress=progress)
    _print_converted(out)


def _to_dcp(
    path: Found,
    out: Out,
    /,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
    flat_optimizer: bool = False,
    one_group: bool = False,
    map: Rules = (),
    only_model: OnlyModel = False,
) -> None:
    """Write a checkpoint as a folder of torch.distributed.checkpoint, for FSDP2.

    Args:
        model_key: key of the model's state; empty: bare names
        optimizer_key: key of the optimizer's state
        flat_optimizer: as flatten_optimizer_state_dict=True reads it
        one_group: all parameters in one group, decayed alike
    """
    reader = open_newest(path)
    policy = DCPExportPolicy(
        rules=[parse_rule(rule) for rule in map], model_key=model_key, optimizer_key=optimizer_key,
        flat_optimizer=flat_optimizer, one_group=one_group, only_model=only_model,
    )  # fmt: skip
    total = sum(t.num_bytes for t in reader.index.tensors.values())
    with _bar(f"{reader.name} to {out}", total) as step:
        to_dcp(path, out, policy, progress=step)
    _console().print(f"{out}: load it with dcp.load into what get_state_dict returns")


def _upcycle(
    source: Source,
    out: Out,
    /,
    *,
    groups: int,
    granularity: int = 1,
    top_k: int,
    seed: int = 0,
    inexact: bool = False,
) -> None:
    """Make a mixture of experts from a dense Hugging Face model.

    Args:
        source: folder of a dense model
        groups: E: copies of each dense MLP
        granularity: G: experts that one dense MLP is cut into
        top_k: T: experts that a token visits; a multiple of G
        seed: of the router
        inexact: allow shapes that differ from the dense model at first
    """
    policy = UpcyclePolicy(groups=groups, granularity=granularity, top_k=top_k, seed=seed, exact=not inexact)
    with _bar(f"{source} to {out}") as step:
        upcycle(source, out, policy, progress=step)
    _print_converted(out)


def _torch_dtype(name: Dtype | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _config_of(folder: str | None) -> Tree | None:
    return json.loads((Path(folder) / CONFIG).read_text()) if folder else None


def _print_converted(path: str) -> None:
    console = _console()
    index = open_newest(path).index
    console.print(_section_table(index))
    only_model = "" if "optimizer" in index.values else " --checkpoint.load_only_model true"
    console.print(f"To train from it: --checkpoint.load {path}{only_model}", markup=False)
    config = index.about.get("hf_config")
    if config is None or not_understood(config):
        return
    fields = model_fields(config)
    rope = fields.pop("rope")
    sections = {"model": {key: value for key, value in fields.items() if value is not None}}
    if rope.type != "default":
        sections["model.rope"] = {"type": rope.type, **rope.stated}
    for section, values in sections.items():
        console.print(f"\n[{section}]", markup=False)
        for key, value in values.items():
            console.print(f"{key} = {json.dumps(value)}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _bar(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """This rank's bytes; with several ranks the first one's share stands for all."""
    share = None if total is None else -(-total // world()[1])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console()) as progress:
        task = progress.add_task(text, total=share)
        yield lambda count: progress.advance(task, count)


if __name__ == "__main__":
    sys.exit(main())
