"""What the commands of ``python -m fsdmoe.checkpoint`` print: tables, and a bar while bytes are moved."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    FileSizeColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fsdmoe.checkpoint.agree import world
from fsdmoe.checkpoint.catalog import all_entries
from fsdmoe.checkpoint.format import Index
from fsdmoe.checkpoint.storage import Storage
from fsdmoe.checkpoint.tree import SEPARATOR


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Names that are too long go on in the next line."""
    found = Table(title=title)
    for heading in headings:
        found.add_column(heading, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found


def folder_table(storage: Storage) -> Table:
    """The checkpoints of a folder, the newest first."""
    pointed = storage.pointed_at()
    rows = [
        (
            entry.name,
            str(entry.step) if entry.step >= 0 else "",
            f"#{entry.serial}" if entry.serial else "unreadable",
            "<-" if entry.name == pointed else "",
        )
        for entry in all_entries(storage)
    ]
    return table(("checkpoint", "step", "finished as", "latest"), rows, storage.root)


def about_line(index: Index) -> str:
    """When a checkpoint was written, by how many ranks, under which layout."""
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


def section_table(index: Index) -> Table:
    """Each part of a checkpoint, with its tensors and plain values added up."""
    found = Table(show_footer=True)
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
        found.add_column(heading, footer=footer, justify="left" if heading == "section" else "right")
    for key in sorted({*rows, *values}):
        count, elements, num_bytes, boxes = rows.get(key, [0, 0, 0, 0])
        plain = decimal(values[key]) if key in values else ""
        found.add_row(key, str(count), f"{elements:,}", decimal(num_bytes), str(boxes), plain)
    return found


def tensor_table(index: Index) -> Table:
    """Every tensor of a checkpoint."""
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
    return table(("tensor", "dtype", "shape", "size", "boxes", "files"), rows)


@contextlib.contextmanager
def progress_bar(console: Console, text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """This rank's bytes; with several ranks the first one's share stands for all."""
    share = None if total is None else -(-total // world()[1])
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    if share is None:  # neither a share nor a remaining time can be shown
        columns = (TextColumn("{task.description}", markup=False), FileSizeColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task(text, total=share)

    def advance(count: int) -> None:
        progress.start()  # not before: what is refused has made no progress
        progress.advance(task, count)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
