"""TensorBoard: the scalars of each row, and a picture of the expert loads.

    train/{loss,lr,grad_norm,loss_scale}  eval/loss  speed/{tokens_per_s,tflops,mfu}  memory/peak_gib
    experts_{max_over_mean,cv,dead_fraction,entropy}/{mean,max,min}    over the MoE layers
    expert_load                                                        the picture, all layers in one

However many layers there are, the tags are the same 22; single layers are in ``metrics.jsonl``. All scalars
of a row are written in one event. A thread of TensorBoard's writes the file.
"""

import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor

from fsdmoe.observe.drawing import charts_for
from fsdmoe.observe.heatmap import LoadHistory
from fsdmoe.observe.metrics import Row, row_scalars

_GROWTH = 1.5
"""How much longer a run must be than at its last picture: to draw one takes a fifth of a second, and each
shows the whole run."""


@functools.cache  # once a process
def _leave_errors_to_caller() -> None:
    """Print no traceback of TensorBoard's thread: its next call raises the error here, where it is told what
    to do about it (a full disk, say)."""
    shown = threading.excepthook

    def show_others(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__ != EventFileWriter.__module__:
            shown(failure)

    threading.excepthook = show_others


class Board:
    """Writes event files. A resumed run hides what an earlier start wrote after the resumed step, and goes on
    with the heat map: its counts are kept next to the events, in ``expert_load.npz``."""

    def __init__(self, folder: Path, *, start_step: int, heatmap_interval: int, heatmap_columns: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _leave_errors_to_caller()
        self._writer = EventFileWriter(str(folder))
        # Readers drop everything from this step on that came before.
        start = Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._write(start)
        self._heatmap_interval = heatmap_interval
        self._loads_path = folder / "expert_load.npz"
        self._history = LoadHistory.load(self._loads_path, heatmap_columns, until=start_step)
        self._last_save_step = self._last_image_step = self._last_step = start_step

    def step(self, row: Row, loads: Mapping[str, Tensor]) -> None:
        """Write a logged step; ``loads`` are the counts behind the row's figures, on the host."""
        step = row["step"]
        self._write_scalars(step, row_scalars(row))
        self._last_step = step
        if self._heatmap_interval == 0:
            return
        if loads:
            self._history.add(step, loads)
        # Logged steps need not be multiples of the interval, so the distance to the last save counts.
        if step - self._last_save_step < self._heatmap_interval:
            return
        self._save_loads(step)
        if step >= _GROWTH * self._last_image_step:
            self._write_image(step)

    def evaluation(self, row: Row) -> None:
        self._write_scalars(row["step"], row_scalars(row))

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _save_loads(self, step: int) -> None:
        self._last_save_step = step
        if self._history.counts():
            self._history.save(self._loads_path)

    def _write_image(self, step: int) -> None:
        self._last_image_step = step
        counts, first_step = self._history.counts(), self._history.first_step
        if not counts:
            return
        if charts := charts_for("the picture of expert loads in TensorBoard"):
            image = charts.load_picture(counts, first_step=first_step, last_step=self._history.last_step)
            value = Summary.Value(tag="expert_load", image=Summary.Image(encoded_image_string=image))
            self._write(Event(step=step, summary=Summary(value=[value])))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def close(self) -> None:
        if self._heatmap_interval and self._last_step > self._last_image_step:
            self._save_loads(self._last_step)
            self._write_image(self._last_step)
        self._writer.close()
