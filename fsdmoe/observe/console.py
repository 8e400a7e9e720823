"""Console output: a live line on a terminal, plain lines elsewhere, tables at start-up."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fsdmoe.observe.config import Progress as ProgressChoice
from fsdmoe.observe.text import duration, number, percent, short

if TYPE_CHECKING:
    from fsdmoe.observe.metrics import Row

logger = logging.getLogger(__name__)

PLAIN_WIDTH = 140  # a file has no width of its own, and rich would fold at 80


class LastingConsole(Console):
    """A console whose broken pipe does not end the run: where rich would exit because the reader is gone (a
    pager was closed, ``tee`` killed), the run goes on without output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _turn_to_nowhere(self.file)
        logger.info("the reader of the standard output is gone: the progress lines end, the run goes on")


@contextlib.contextmanager
def suppress_broken_pipe() -> Iterator[None]:
    """A reader that closes the pipe early (``--help | head``) is no error."""
    _take_any_text(sys.stdout)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _turn_to_nowhere(sys.stdout)


def _turn_to_nowhere(stream: IO[str]) -> None:
    """For a pipe without a reader: what is left in the stream's buffer must go somewhere, at the latest when
    the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _take_any_text(stream: IO[str]) -> None:
    """Write an escape for a character that the encoding lacks (Latin-1, ASCII), so that no sample of a model
    and no name of a folder ends a run."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def make_console(progress: ProgressChoice = "auto") -> Console:
    """A console on the standard output of the moment, wide where it is not a terminal."""
    _take_any_text(sys.stdout)
    console = LastingConsole(force_terminal=True if progress == "on" else None, highlight=False)
    return console if console.is_terminal else LastingConsole(highlight=False, width=PLAIN_WIDTH)


def print_evaluation(loss: float, step: int, *, is_main: bool) -> None:
    """The answer of ``--evaluate-only``, on the standard output."""
    if is_main:
        after = f"after step {step}" if step else "untrained here"
        with suppress_broken_pipe():
            print(f"held-out loss {loss:.6f}, perplexity {math.exp(min(loss, 700.0)):.4g} ({after})")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a titled table. Numbers stand on the right."""
    rows = [tuple(row) for row in rows]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: expected {len(columns)} cells a row, got {len(row)}: {row}")
    table = Table(title=Text(title, style="bold"), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(Text(column), justify="right" if numeric else "left")
    for row in rows:
        # Text, not str: square brackets in a cell are no markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    make_console().print(table)


class Screen:
    """The console of one run. Built and used on the first rank only."""

    def __init__(self, progress: ProgressChoice, *, total_steps: int, start_step: int = 0) -> None:
        self.console = make_console(progress)
        self._total_steps = total_steps
        live = progress == "on" or (
            progress == "auto" and self.console.is_terminal and not self.console.is_dumb_terminal
        )
        self._row: Row | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if live:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self.console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=start_step, figures="")
            self._progress.start()

    def advance(self, step: int, loss: float | None, eta_seconds: float | None) -> None:
        """A step that is not logged is over: the live line shows its loss with the last row's figures."""
        if self._progress is not None:
            row = None if self._row is None else self._row | {"loss": loss}
            figures = "" if row is None else live_figures(row, eta_seconds)
            self._progress.update(self._task, completed=step, figures=figures)

    def show(self, row: Row, eta_seconds: float | None) -> None:
        """A logged step is over."""
        self._row = row
        if self._progress is not None:
            figures = live_figures(row, eta_seconds)
            self._progress.update(self._task, completed=row["step"], figures=figures)
        else:
            self.note(plain_line(row, self._total_steps, eta_seconds))

    def note(self, text: str) -> None:
        """A line of its own; the live line stays whole below it."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def live_figures(row: Row, eta_seconds: float | None) -> str:
    """The right part of the live line, short enough for 100 columns; MFU only where it is known."""
    parts = [
        f"loss {number(row['loss'], '.4f')}",
        *reward_figures(row),
        f"{short(row['tokens_per_s'])} tok/s",
        f"{short(row['tflops'])} TFLOP/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"MFU {percent(row['mfu'])}")
    parts += [f"{row['memory_gib']:.1f} GiB", f"ETA {duration(eta_seconds)}"]
    return "  ".join(parts)


def plain_line(row: Row, total_steps: int, eta_seconds: float | None) -> str:
    """A logged step as one line of a log file; columns stay aligned from row to row."""
    width = len(str(total_steps))
    parts = [
        f"step {row['step']:>{width}}/{total_steps}",
        f"loss {number(row['loss'], '.4f'):>7}",
        *reward_figures(row),
        f"lr {row['lr']:.2e}",
        f"grad norm {number(row['grad_norm'], '.3g'):>6}",
        f"{short(row['tokens_per_s']):>6} tok/s",
        f"{short(row['tflops']):>6} TFLOP/s",
        f"MFU {percent(row['mfu']):>5}",
        f"{row['memory_gib']:.2f} GiB",
    ]
    worst = worst_imbalance(row)
    if worst is not None:
        parts.append(f"load max/mean {worst:.2f}")
    if row.get("loss_scale") is not None:
        parts.append(f"scale {row['loss_scale']:g}")
    if row["skipped"]:
        parts.append(f"skipped {row['skipped']}")
    if row.get("exchange"):
        parts.append(f"buffers {percent(row['exchange']['fill'])} full")
    if row.get("exchange", {}).get("repeated"):
        parts.append(f"repeated {row['exchange']['repeated']:.0f}")
    parts.append(f"ETA {duration(eta_seconds)}")
    return " | ".join(parts)


def reward_figures(row: Row) -> list[str]:
    """Of pairs of answers, how far the chosen ones are ahead, and in which share of the pairs they are."""
    if row.get("reward_margin") is None:
        return []
    return [f"margin {row['reward_margin']:.3f}", f"accuracy {percent(row['reward_accuracy'])}"]


def worst_imbalance(row: Row) -> float | None:
    """Highest max/mean load among the MoE layers of a row."""
    ratios = [figures["max_over_mean"] for figures in row.get("experts", {}).values()]
    return max((ratio for ratio in ratios if ratio is not None), default=None)
