"""TensorBoard: the scalars of each row, and a picture of the expert loads.

    train/{loss,lr,grad_norm,loss_scale}  eval/loss  speed/{tokens_per_s,tflops,mfu}  memory/peak_gib
    experts_{max_over_mean,cv,dead_fraction,entropy}/{mean,max,min}    over the MoE layers
    expert_load                                                        the picture, all layers in one

However many layers there are, the tags are the same 22; single layers are in ``metrics.jsonl``. All scalars
of a row are written in one event. A thread of TensorBoard's writes the file.
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

from fsdmoe.observe.heatmap import LoadHistory
from fsdmoe.observe.heatmap_picture import load_picture
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
    """Writes event files. A resumed run hides what an earlier start wrote after the resumed step, and goes on
    with the heat map: its counts are kept next to the events, in ``expert_load.npz``."""

    def __init__(self, folder: Path, *, start_step: int, heatmap_interval: int, heatmap_columns: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # Readers drop everything from this step on that came before.
        start = Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._write(start)
        self._heatmap_interval = heatmap_interval
        self._loads_path = folder / "expert_load.npz"
        self._history = LoadHistory.load(self._loads_path, heatmap_columns, until=start_step)
        self._last_image_step = self._last_step = start_step

    def step(self, row: Row, loads: Mapping[str, Tensor]) -> None:
        """Write a logged step; ``loads`` are the counts behind the row's figures, on the host."""
        step = row["step"]
        scalars = {tag: row.get(key) for key, tag in _TAGS.items()}
        self._write_scalars(step, scalars | over_layers(row.get("experts", {})))
        self._last_step = step
        if self._heatmap_interval == 0:
            return
        if loads:
            self._history.add(step, loads)
        # Logged steps need not be multiples of the interval, so the distance to the last picture counts.
        if step - self._last_image_step >= self._heatmap_interval:
            self._write_images(step)

    def evaluation(self, step: int, eval_loss: float) -> None:
        self._write_scalars(step, {"eval/loss": eval_loss})

    def _write_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items() if v is not None]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write_images(self, step: int) -> None:
        self._last_image_step = step
        counts, first_step = self._history.counts(), self._history.first_step
        if not counts:
            return
        image = load_picture(counts, first_step=first_step, last_step=self._history.last_step)
        picture = Summary.Image(
            height=image.shape[1],
            width=image.shape[2],
            colorspace=3,
            encoded_image_string=encode_png(image),
        )
        value = Summary.Value(tag="expert_load", image=picture)
        self._write(Event(step=step, summary=Summary(value=[value])))
        self._history.save(self._loads_path)

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def close(self) -> None:
        if self._heatmap_interval and self._last_step > self._last_image_step:
            self._write_images(self._last_step)
        self._writer.close()


def over_layers(experts: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """Mean, maximum and minimum of each figure over the layers that have it."""
    scalars: dict[str, float | None] = {}
    for name in dict.fromkeys(name for figures in experts.values() for name in figures):
        known = [value for figures in experts.values() if (value := figures.get(name)) is not None]
        if known:
            scalars[f"experts_{name}/mean"] = sum(known) / len(known)
            scalars[f"experts_{name}/max"] = max(known)
            scalars[f"experts_{name}/min"] = min(known)
    return scalars


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
