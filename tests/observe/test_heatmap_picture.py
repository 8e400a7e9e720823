"""The picture of all layers: cells where the axes say, labels, a legend."""

import pytest
import torch

from fsdmoe.observe.heatmap import load_colours
from fsdmoe.observe.heatmap_picture import HEADER_HEIGHT, PLOT_HEIGHT, PLOT_WIDTH, load_picture
from fsdmoe.observe.pixel_font import CHAR_HEIGHT, INK, draw_text, text_width


def find(picture, part):
    """Where the part is in the picture, as (top, left) of every place."""
    height, width = part.shape[1:]
    rows, columns = picture.shape[1] - height + 1, picture.shape[2] - width + 1
    maybe = torch.ones(rows, columns, dtype=torch.bool)
    for y in range(0, height, max(1, height // 6)):  # some pixels rule out nearly every place
        for x in range(0, width, max(1, width // 6)):
            maybe &= picture[0, y : y + rows, x : x + columns] == part[0, y, x]
    places = maybe.nonzero().tolist()
    return [[y, x] for y, x in places if torch.equal(picture[:, y : y + height, x : x + width], part)]


def text(label, *, upwards=False):
    size = (text_width(label), CHAR_HEIGHT) if upwards else (CHAR_HEIGHT, text_width(label))
    part = torch.full((3, *size), 255, dtype=torch.uint8)
    draw_text(part, 0, size[0] if upwards else 0, label, upwards=upwards)
    return part


COUNTS = {
    "layer 3": torch.tensor([[4.0, 1.0], [4.0, 7.0], [4.0, 4.0], [4.0, 4.0]]),
    "layer 4": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]]),
}


def test_the_cells_of_every_layer_are_in_it_beside_its_axes():
    picture = load_picture(COUNTS, first_step=1, last_step=1300)
    for layer, counts_EC in COUNTS.items():
        cells = load_colours(counts_EC)
        blocks = cells.repeat_interleave(PLOT_HEIGHT // 4, 1).repeat_interleave(PLOT_WIDTH // 2, 2)
        ((top, left),) = find(picture, blocks)
        ((title_top, title_left),) = find(picture, text(layer))
        assert title_left == left
        assert title_top < top
        bottom, right = top + PLOT_HEIGHT, left + PLOT_WIDTH
        below = find(picture, text("1,300"))
        assert any(y >= bottom and x + text_width("1,300") == right for y, x in below)
        assert any(y >= bottom and left < x < right for y, x in find(picture, text("step")))
        assert any(x < left and top <= y < bottom for y, x in find(picture, text("expert", upwards=True)))
        assert any(x < left and y == top for y, x in find(picture, text("0")))


@pytest.mark.parametrize(
    "label",
    ["expert load at step 1,300", "1/4 to 4 times an even share", "no token", "layer without tokens"],
)
def test_step_and_legend_stand_above(label):
    picture = load_picture(COUNTS, first_step=1, last_step=1300)
    ((top, _),) = find(picture[:, :HEADER_HEIGHT], text(label))
    assert top < HEADER_HEIGHT


@pytest.mark.parametrize(("num_layers", "num_experts", "num_columns"), [(1, 512, 700), (48, 8, 3), (3, 1, 1)])
def test_any_number_of_layers_experts_and_columns_fits(num_layers, num_experts, num_columns):
    counts = {f"layer {n}": torch.ones(num_experts, num_columns) for n in range(num_layers)}
    picture = load_picture(counts, first_step=1, last_step=10_000_000)
    assert picture.dtype == torch.uint8
    assert (picture == INK).any()
    assert picture.shape[1] >= num_experts
    assert picture.shape[2] >= num_columns
