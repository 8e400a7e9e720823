"""TensorBoard: the scalars of each row, and the expert-load heat maps.

    train/{loss,lr,grad_norm,loss_scale}  eval/loss  speed/{tokens_per_s,tflops,mfu}  memory/peak_gib
    experts_{max_over_mean,cv,dead_fraction,entropy}/<layer>    expert_load/<layer> (image)

All scalars of a row are written in one event, which is far cheaper than one event each when a model
has dozens of MoE layers. A thread of TensorBoard's writes the file.
"""

import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor

from fsdmoe.observe.heatmap import LoadHistory, heatmap_image
from fsdmoe.observe.metrics import Row

_TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory_gib": "memory/peak_gib",
}


class Board:
    """Writes event files. A resumed run hides what an earlier start wrote after the resumed step."""

    def __init__(self, folder: Path, *, start_step: int, heatmap_interval: int, heatmap_columns: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # Readers drop everything from this step on that came before.
        start = Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._write(start)
        self._heatmap_interval = heatmap_interval
        self._heatmap_columns = heatmap_columns
        self._histories: dict[str, LoadHistory] = {}
        self._last_image_step = self._last_step = start_step

    def step(self, row: Row, loads: Mapping[str, Tensor]) -> None:
        """Write a logged step; ``loads`` are the counts behind the row's figures, on the host."""
        step = row["step"]
        scalars = {tag: row.get(key) for key, tag in _TAGS.items()}
        for layer, figures in row.get("experts", {}).items():
            scalars.update({f"experts_{name}/{layer}": value for name, value in figures.items()})
        self._write_scalars(step, scalars)
        self._last_step = step
        if self._heatmap_interval == 0:
            return
        for layer, load_E in loads.items():
            self._histories.setdefault(layer, LoadHistory(self._heatmap_columns)).add(load_E)
        # Logged steps need not be multiples of the interval, so the distance to the last picture counts.
        if step - self._last_image_step >= self._heatmap_interval:
            self._write_images(step)

    def evaluation(self, step: int, eval_loss: float) -> None:
        self._write_scalars(step, {"eval/loss": eval_loss})

    def _write_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items() if v is not None]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write_images(self, step: int) -> None:
        for layer, history in self._histories.items():
            image = heatmap_image(history.counts_EC())
            picture = Summary.Image(
                height=image.shape[1],
                width=image.shape[2],
                colorspace=3,
                encoded_image_string=encode_png(image),
            )
            value = Summary.Value(tag=f"expert_load/{layer}", image=picture)
            self._write(Event(step=step, summary=Summary(value=[value])))
        self._last_image_step = step

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def close(self) -> None:
        if self._last_step > self._last_image_step:
            self._write_images(self._last_step)
        self._writer.close()


def encode_png(image: Tensor) -> bytes:
    """A uint8 picture [3, height, width] as a PNG file."""
    _, height, width = image.shape
    rows = image.permute(1, 2, 0).reshape(height, width * 3).numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)  # each line is led by its filter type: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in chunks)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
