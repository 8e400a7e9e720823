"""The heat maps of all MoE layers as one picture, with what a reader needs to understand it.

    expert load at step 1,300
    [colours]  1/4 to 4 times an even share
    [black] no token    [grey] layer without tokens

        layer 0                 layer 1
      0 +------------+        0 +------------+
        |            |          |            |          one row an expert, one column a range of steps
    127 +------------+      127 +------------+
        1   step 1,300          1   step 1,300

Legend: E experts, C columns.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fsdmoe.observe.heatmap import DEAD, NO_TOKENS, SPAN, load_colours
from fsdmoe.observe.pixel_font import CHAR_HEIGHT, CHAR_WIDTH, draw_text, text_width

PLOT_WIDTH, PLOT_HEIGHT = 320, 128  # at least; more where there are more columns or experts than pixels
GAP = 20
LINE = CHAR_HEIGHT + 4
BAR_WIDTH = 120
HEADER_WIDTH, HEADER_HEIGHT = 520, 3 * LINE + GAP
ASPECT = 1.5  # width over height of the grid of layers, about


def load_picture(counts: Mapping[str, Tensor], *, first_step: int, last_step: int) -> Tensor:
    """The picture as a uint8 tensor [3, height, width], from counts_EC of each layer."""
    panels = [_panel(name, counts_EC, first_step, last_step) for name, counts_EC in counts.items()]
    height, width = (max(panel.shape[dim] for panel in panels) + GAP for dim in (1, 2))
    num_columns = min(len(panels), max(1, round(math.sqrt(ASPECT * len(panels) * height / width))))
    num_rows = math.ceil(len(panels) / num_columns)
    picture = _blank(HEADER_HEIGHT + num_rows * height, GAP + max(HEADER_WIDTH, num_columns * width))
    _draw_header(picture, last_step)
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        _paste(picture, panel, GAP + column * width, HEADER_HEIGHT + row * height)
    return picture


def _draw_header(picture: Tensor, last_step: int) -> None:
    draw_text(picture, GAP, GAP // 2, f"expert load at step {last_step:,}")
    top = GAP // 2 + LINE
    share_1C = torch.linspace(-SPAN, SPAN, BAR_WIDTH).exp2().unsqueeze(0)
    _paste(
        picture, _enlarged(load_colours(share_1C, mean_1C=torch.ones_like(share_1C)), CHAR_HEIGHT), GAP, top
    )
    draw_text(picture, GAP + BAR_WIDTH + CHAR_WIDTH, top, "1/4 to 4 times an even share")
    left = GAP
    for colour, label in ((DEAD, "no token"), (NO_TOKENS, "layer without tokens")):
        square = torch.tensor(colour).to(torch.uint8).view(3, 1, 1).expand(3, CHAR_HEIGHT, CHAR_HEIGHT)
        _paste(picture, square, left, top + LINE)
        draw_text(picture, left + CHAR_HEIGHT + CHAR_WIDTH, top + LINE, label)
        left += CHAR_HEIGHT + text_width(label) + 3 * CHAR_WIDTH


def _panel(name: str, counts_EC: Tensor, first_step: int, last_step: int) -> Tensor:
    """One layer: its name above, experts at the left, steps below."""
    num_experts, num_columns = counts_EC.shape
    height, width = max(PLOT_HEIGHT, num_experts), max(PLOT_WIDTH, num_columns)
    last_expert = str(num_experts - 1)
    left = LINE + text_width(last_expert) + CHAR_WIDTH // 2
    panel = _blank(LINE + height + LINE, left + width)
    draw_text(panel, left, 0, name[: width // CHAR_WIDTH])
    draw_text(panel, 0, LINE + (height + text_width("expert")) // 2, "expert", upwards=True)
    draw_text(panel, left - text_width("0") - CHAR_WIDTH // 2, LINE, "0")
    bottom = LINE + height
    draw_text(panel, LINE, bottom - CHAR_HEIGHT, last_expert)
    _paste(panel, _enlarged(load_colours(counts_EC), height, width), left, LINE)
    last = f"{last_step:,}"
    draw_text(panel, left, bottom + 4, f"{first_step:,}")
    draw_text(panel, left + (width - text_width("step")) // 2, bottom + 4, "step")
    draw_text(panel, left + width - text_width(last), bottom + 4, last)
    return panel


def _blank(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 255, dtype=torch.uint8)


def _paste(picture: Tensor, part: Tensor, left: int, top: int) -> None:
    picture[:, top : top + part.shape[1], left : left + part.shape[2]] = part


def _enlarged(cells: Tensor, height: int, width: int | None = None) -> Tensor:
    """Each cell as a block of pixels; all blocks differ by a pixel at most."""
    rows = torch.arange(height) * cells.shape[1] // height
    width = width or cells.shape[2]
    columns = torch.arange(width) * cells.shape[2] // width
    return cells[:, rows][:, :, columns]
