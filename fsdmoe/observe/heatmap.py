"""Expert load over time: counts in a bounded number of columns.

Legend: E experts, C columns, A experts of all layers one after another.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPAN = 2.0  # powers of two from an even share to what is shown as most or least


class LoadHistory:
    """Counts per expert of all layers over the whole run, in at most ``max_columns`` columns.

    Every column adds up the same number of records. When all are used, neighbours are added in pairs and from
    then on each column takes twice as many records.
    """

    def __init__(self, max_columns: int) -> None:
        if max_columns < 2:
            raise ValueError(f"max_columns: expected 2 or more, got {max_columns}")
        self._max_columns = max_columns
        self._begin({}, 0)

    def _begin(self, sizes: dict[str, int], first_step: int) -> None:
        self._sizes, self.first_step = sizes, first_step
        self._columns: list[Tensor] = []
        self._last_steps: list[int] = []
        self._in_last, self.records_per_column = 0, 1

    @property
    def last_step(self) -> int:
        return self._last_steps[-1] if self._last_steps else 0

    def add(self, step: int, loads: Mapping[str, Tensor]) -> None:
        """Take in the counts of one record, layer by layer (on the host)."""
        sizes = {name: load_E.numel() for name, load_E in loads.items()}
        if sizes != self._sizes:  # the first record, or a resumed run with another model
            self._begin(sizes, step)
        load_A = torch.cat([load_E.detach().to("cpu", torch.float32) for load_E in loads.values()])
        if len(self._columns) == self._max_columns and self._in_last == self.records_per_column:
            self._halve()
        if self._columns and self._in_last < self.records_per_column:
            self._columns[-1] += load_A
            self._last_steps[-1] = step
            self._in_last += 1
        else:
            self._columns.append(load_A)
            self._last_steps.append(step)
            self._in_last = 1

    def _halve(self) -> None:
        columns, last_steps = self._columns, self._last_steps
        self._columns = [first + second for first, second in zip(columns[0::2], columns[1::2], strict=False)]
        self._last_steps = last_steps[1::2]
        if len(columns) % 2:  # half full from now on: it takes the next records
            self._columns.append(columns[-1])
            self._last_steps.append(last_steps[-1])
        else:
            self._in_last += self.records_per_column
        self.records_per_column *= 2

    def counts(self) -> dict[str, Tensor]:
        """Layer -> counts_EC, oldest column first."""
        if not self._columns:
            return {}
        parts = torch.stack(self._columns, dim=1).split(list(self._sizes.values()))
        return dict(zip(self._sizes, parts, strict=True))

    def save(self, path: Path) -> None:
        """For the next start of the run."""
        if not self._columns:
            return
        new = path.with_name(path.name + ".tmp")
        with new.open("wb") as file:
            np.savez(
                file,
                names=np.array(list(self._sizes)),
                sizes=np.array(list(self._sizes.values())),
                columns=torch.stack(self._columns).numpy(),
                last_steps=np.array(self._last_steps),
                counters=np.array([self._in_last, self.records_per_column, self.first_step]),
            )
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    @classmethod
    def load(cls, path: Path, max_columns: int, *, until: int) -> LoadHistory:
        """What was saved of the steps up to ``until``; an empty one where nothing was. A column that goes
        beyond is left out whole: its steps come again."""
        history = cls(max_columns)
        try:
            with np.load(path, allow_pickle=False) as stored:
                counters = stored["counters"].tolist()
                history._sizes = dict(zip(stored["names"].tolist(), stored["sizes"].tolist(), strict=True))
                history._columns = list(torch.from_numpy(stored["columns"]))
                history._last_steps = stored["last_steps"].tolist()
            history._in_last, history.records_per_column, history.first_step = counters
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return cls(max_columns)
        while history.last_step > until:
            history._columns.pop()
            history._last_steps.pop()
            history._in_last = history.records_per_column
        while len(history._columns) > max_columns:
            history._halve()
        return history if history._columns else cls(max_columns)


def load_tones(counts_EC: Tensor) -> NDArray[np.float32]:
    """Of every cell, its count over the mean of its column as a power of two, within ``SPAN``; twice as low
    where there is none, not a number in a column without tokens."""
    tones_EC = (counts_EC / counts_EC.mean(dim=0, keepdim=True)).log2()  # 0 / 0 is not a number
    return torch.where(tones_EC == -torch.inf, -2 * SPAN, tones_EC.clamp(-SPAN, SPAN)).numpy()
