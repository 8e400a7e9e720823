"""TensorBoard: the scalars of each row, and the expert-load heat maps.

train/{loss,lr,grad_norm}  eval/loss  speed/{tokens_per_s,tflops,mfu}  memory/peak_gib
experts_{max_over_mean,cv,dead_fraction,entropy}/<layer>    expert_load/<layer> (image)
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from fsdmoe.observe.heatmap import LoadHistory, heatmap_image
from fsdmoe.observe.metrics import Row

_TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_per_s": "speed/tokens_per_s",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory_gib": "memory/peak_gib",
}


class Board:
    """Writes event files. A resumed run hides what an earlier start wrote after the resumed step."""

    def __init__(self, folder: Path, *, start_step: int, heatmap_interval: int, heatmap_columns: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)
        self._heatmap_interval = heatmap_interval
        self._heatmap_columns = heatmap_columns
        self._histories: dict[str, LoadHistory] = {}
        self._last_image_step = self._last_step = start_step

    def step(self, row: Row, loads: Mapping[str, Tensor]) -> None:
        """Write a logged step; ``loads`` are the counts behind the row's figures, on the host."""
        step = row["step"]
        for key, tag in _TAGS.items():
            if row[key] is not None:
                self._writer.add_scalar(tag, row[key], step)
        for layer, figures in row.get("experts", {}).items():
            for name, value in figures.items():
                if value is not None:
                    self._writer.add_scalar(f"experts_{name}/{layer}", value, step)
        self._last_step = step
        if self._heatmap_interval == 0:
            return
        for layer, load_E in loads.items():
            self._histories.setdefault(layer, LoadHistory(self._heatmap_columns)).add(load_E)
        # Logged steps need not be multiples of the interval, so the distance to the last picture counts.
        if step - self._last_image_step >= self._heatmap_interval:
            self._write_images(step)

    def evaluation(self, step: int, eval_loss: float) -> None:
        self._writer.add_scalar("eval/loss", eval_loss, step)

    def _write_images(self, step: int) -> None:
        for layer, history in self._histories.items():
            image = heatmap_image(history.counts_EC())
            self._writer.add_image(f"expert_load/{layer}", image, step, dataformats="CHW")
        self._last_image_step = step

    def close(self) -> None:
        if self._last_step > self._last_image_step:
            self._write_images(self._last_step)
        self._writer.close()
