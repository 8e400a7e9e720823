"""Expert load over time as a picture: one row an expert, one column a stretch of steps, oldest on the left.

    blue            the expert received less than an even share, deepest at a quarter or less
    white           an even share
    red             more than an even share, deepest at four times or more
    black           nothing at all: a dead expert
    grey column     no token was routed in that stretch

Legend: E experts, C columns.
"""

import torch
from torch import Tensor

_UNDER = (33.0, 102.0, 172.0)
_EVEN = (247.0, 247.0, 247.0)
_OVER = (178.0, 24.0, 43.0)
_DEAD = (0.0, 0.0, 0.0)
_NO_TOKENS = (150.0, 150.0, 150.0)
_SPAN_LOG2 = 2.0  # the deepest colours stand for 1/4 and 4 times an even share
_TARGET_HEIGHT, _TARGET_WIDTH, _LARGEST_CELL = 160, 320, 16  # TensorBoard scales pictures up by itself


class LoadHistory:
    """Counts per expert over the whole run in at most ``max_columns`` columns.

    Every column adds up the same number of records. When all are used, neighbours are added in pairs and from
    then on each column takes twice as many records.
    """

    def __init__(self, max_columns: int) -> None:
        if max_columns < 2:
            raise ValueError(f"max_columns: expected 2 or more, got {max_columns}")
        self._max_columns = max_columns
        self._columns: list[Tensor] = []
        self._in_last = 0
        self.records_per_column = 1

    def add(self, load_E: Tensor) -> None:
        """Take in the counts of one record (on the host)."""
        if len(self._columns) == self._max_columns and self._in_last == self.records_per_column:
            self._halve()
        if self._columns and self._in_last < self.records_per_column:
            self._columns[-1] += load_E
            self._in_last += 1
        else:
            self._columns.append(load_E.detach().to(device="cpu", dtype=torch.float32, copy=True))
            self._in_last = 1

    def _halve(self) -> None:
        columns = self._columns
        self._columns = [first + second for first, second in zip(columns[0::2], columns[1::2], strict=False)]
        if len(columns) % 2:
            self._columns.append(columns[-1])  # half full from now on: it takes the next records
        else:
            self._in_last *= 2
        self.records_per_column *= 2

    def counts_EC(self) -> Tensor:
        """All columns, oldest first."""
        return torch.stack(self._columns, dim=1) if self._columns else torch.zeros(0, 0)


def heatmap_image(counts_EC: Tensor) -> Tensor:
    """The picture as a uint8 tensor [3, height, width], each cell a block of equal pixels."""
    num_experts, num_columns = counts_EC.shape
    if num_experts == 0 or num_columns == 0:
        raise ValueError(f"counts_EC: expected at least one expert and column, got {tuple(counts_EC.shape)}")
    mean_1C = counts_EC.mean(dim=0, keepdim=True)
    relative_EC = counts_EC / mean_1C.clamp_min(torch.finfo(torch.float32).tiny)
    tone_EC = (relative_EC.clamp_min(2.0**-30).log2() / _SPAN_LOG2).clamp(-1.0, 1.0)
    under, even, over = torch.tensor(_UNDER), torch.tensor(_EVEN), torch.tensor(_OVER)
    tone_EC1 = tone_EC.unsqueeze(-1)
    span_EC3 = torch.where(tone_EC1 < 0, even - under, over - even)
    colours_EC3 = even + span_EC3 * tone_EC1
    colours_EC3[counts_EC == 0] = torch.tensor(_DEAD)
    colours_EC3[:, mean_1C[0] == 0] = torch.tensor(_NO_TOKENS)
    cell_height = _cell(_TARGET_HEIGHT, num_experts)
    cell_width = _cell(_TARGET_WIDTH, num_columns)
    blocks = colours_EC3.round().to(torch.uint8).permute(2, 0, 1)
    return blocks.repeat_interleave(cell_height, dim=1).repeat_interleave(cell_width, dim=2).contiguous()


def _cell(target: int, count: int) -> int:
    return max(1, min(_LARGEST_CELL, target // count))
