"""Letters of 5 x 9 pixels, for labels inside a picture: TensorBoard shows PNGs, and no font needs to be
installed. Capitals are drawn as small letters."""

import torch
from torch import Tensor

SCALE = 2
ROWS = 9  # the lowest two are for what hangs below the line
CHAR_WIDTH, CHAR_HEIGHT = 6 * SCALE, ROWS * SCALE
INK = 60

# Rows from the top, each a digit of base 32 whose bits are the five pixels; rows left out are empty.
_GLYPHS = {
    "0": "ehjlphe", "1": "4c4444e", "2": "eh1248v", "3": "v2421he", "4": "26aiv22", "5": "vgu11he",
    "6": "68guhhe", "7": "v124888", "8": "ehhehhe", "9": "ehhf12c", "a": "00e1fhf", "b": "ggmphhu",
    "c": "00egghe", "d": "11djhhf", "e": "00ehvge", "f": "698s888", "g": "00djhjd1e", "h": "ggmphhh",
    "i": "40c444e", "j": "2062222ic", "k": "ggikoki", "l": "c44444e", "m": "00qllhh", "n": "00mphhh",
    "o": "00ehhhe", "p": "00mphpmgg", "q": "00djhjd11", "r": "00mpggg", "s": "00ege1u", "t": "88s8896",
    "u": "00hhhjd", "v": "00hhha4", "w": "00hhlla", "x": "00ha4ah", "y": "00hhhjd1e", "z": "00v248v",
    " ": "0000000", ".": "00000cc", ",": "0000c48", "/": "01248g0", "-": "000v000", "_": "000000v",
    ":": "0cc0cc0", "(": "2488842", ")": "8422248", "+": "044v440",
}  # fmt: skip
_UNKNOWN = "vhhhhhv"  # a box


def draw_text(picture: Tensor, x: int, y: int, text: str, *, upwards: bool = False) -> None:
    """Draw into a picture [3, height, width] from the pixel (x, y) on, the text's upper left corner;
    ``upwards`` turns the text by a quarter, and (x, y) is its lower left corner. It must fit."""
    mask = _text_mask(text)
    if upwards:
        mask, y = mask.rot90(), y - mask.shape[1]
    height, width = mask.shape
    picture[:, y : y + height, x : x + width][:, mask] = INK


def _text_mask(text: str) -> Tensor:
    """Which pixels are ink, [rows, 6 columns a character], enlarged."""
    glyphs = [_GLYPHS.get(character, _UNKNOWN).ljust(ROWS, "0") for character in text.lower()]
    rows = [
        [int(glyph[row], 32) >> (5 - column) & 1 if column else 0 for glyph in glyphs for column in range(6)]
        for row in range(ROWS)
    ]
    mask = torch.tensor(rows, dtype=torch.bool)
    return mask.repeat_interleave(SCALE, dim=0).repeat_interleave(SCALE, dim=1)


def text_width(text: str) -> int:
    return len(text) * CHAR_WIDTH
