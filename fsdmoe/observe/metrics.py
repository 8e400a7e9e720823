"""``metrics.jsonl``: one JSON object a line, flushed line by line, that survives kills and resumes.

Three kinds of rows. A step: ``step, tokens, loss, lr, grad_norm, tokens_per_s, tflops, mfu, memory_gib,
seconds, skipped`` and, when there are MoE layers, ``experts``: layer name -> its load figures, and with
EP ``busiest_rank``, its rows over the mean (with the
``flex`` dispatcher also ``exchange``: how full buffers were, how often they were too small; with
``optim.qk_clip`` also ``attention_logits``: layer name -> the largest; of pairs of answers also
``reward_margin`` and ``reward_accuracy``). An evaluation: ``step, eval_loss``
(and ``eval_loss_ema``, of averaged weights). Operands of quantised layers, on request: ``step, operands``.
What is not a finite number is written as null, so that every line is valid JSON.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from torch.utils._pytree import tree_map_only

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "reward_margin": "train/reward_margin",
    "reward_accuracy": "train/reward_accuracy",
    "eval_loss": "eval/loss",
    "eval_loss_ema": "eval/loss_ema",
    "tokens_per_s": "speed/tokens_per_s",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory_gib": "memory/peak_gib",
    "busiest_rank": "experts/busiest_rank",
}


class MetricsFile:
    """Appends rows. Opening it at ``start_step`` first drops what an earlier start wrote after that step.

    A run killed at step 57 and resumed from the checkpoint of step 50 would otherwise hold steps 51 to 57
    twice.
    """

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kept: list[Row] = []
        self.num_dropped = 0
        if path.exists():
            self._trim(path, start_step)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._is_cut = False
        """It may end in a part of a row."""

    def _trim(self, path: Path, start_step: int) -> None:
        num_lines, line = 0, "\n"
        for line in _lines(path):
            num_lines += 1
            row = _parse(line)
            if row is not None and row["step"] <= start_step:
                self.kept.append(row)
        self.num_dropped = num_lines - len(self.kept)
        if self.num_dropped == 0 and line.endswith("\n"):
            return
        # A new file takes the old one's place in one move: a kill in between leaves one or the other, whole.
        trimmed = path.with_name(path.name + ".tmp")
        try:
            with trimmed.open("w", encoding="utf-8") as file:
                file.writelines(_dump(row) for row in self.kept)
                file.flush()
                os.fsync(file.fileno())
            trimmed.replace(path)
        except OSError as error:  # a full disk does not end the run
            logger.warning("%s keeps %d rows of later steps: %s", path, self.num_dropped, error)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system, so that a crash loses nothing already logged.
        A full disk does not end the run, which may save elsewhere: rows are missing until it has space."""
        try:
            self._file.write("\n" + _dump(row) if self._is_cut else _dump(row))
            self._file.flush()
            self._is_cut = False
        except OSError as error:
            if not self._is_cut:
                logger.warning("%s: rows are missing until it can be written: %s", self._file.name, error)
            self._is_cut = True

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.warning("%s: its last rows are missing: %s", self._file.name, error)


def read_metrics(path: Path) -> list[Row]:
    """All whole rows of a metrics file (a run that is being written, or was killed, may end in half a
    line)."""
    return [row for line in _lines(path) if (row := _parse(line)) is not None]


def row_scalars(row: Row) -> dict[str, float]:
    """What is known in a row of either kind, by the tag it is logged under; of the experts' figures the mean,
    maximum and minimum over the layers, so that tags are few however many layers there are."""
    found = {tag: row[key] for key, tag in _TAGS.items() if row.get(key) is not None}
    experts = row.get("experts", {})
    for name in dict.fromkeys(name for figures in experts.values() for name in figures):
        known = [value for figures in experts.values() if (value := figures.get(name)) is not None]
        if known:
            found[f"experts_{name}/mean"] = sum(known) / len(known)
            found[f"experts_{name}/max"] = max(known)
            found[f"experts_{name}/min"] = min(known)
    logits = [value for value in row.get("attention_logits", {}).values() if value is not None]
    return found | ({"train/attention_logits": max(logits)} if logits else {})


def unknown_scalars(row: Row) -> dict[str, float]:
    """Loss and norm where they are not finite: these must not look like those of the step before."""
    return {_TAGS[key]: math.nan for key in ("loss", "grad_norm") if key in row and row[key] is None}


def finite_or_none(value: Any) -> Any:
    """``value`` with every float that JSON cannot say replaced by None, through dictionaries and lists."""
    return tree_map_only(float, lambda number: number if math.isfinite(number) else None, value)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.strip())


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_none(row), allow_nan=False) + "\n"
