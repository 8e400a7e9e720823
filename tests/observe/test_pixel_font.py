"""Letters inside a picture."""

import torch

from fsdmoe.observe.pixel_font import _GLYPHS, CHAR_HEIGHT, CHAR_WIDTH, INK, SCALE, draw_text, text_width


def blank(height, width):
    return torch.full((3, height, width), 255, dtype=torch.uint8)


def drawn(text, **options):
    picture = blank(60, 60)
    draw_text(picture, 10, 40 if options else 10, text, **options)
    return (picture[0] == INK)[::SCALE, ::SCALE]


def test_a_letter_has_the_shape_it_is_known_by():
    rows = ["".join("#" if ink else "." for ink in row) for row in drawn("7")[5:12, 6:11].tolist()]
    assert rows == ["#####", "....#", "...#.", "..#..", ".#...", ".#...", ".#..."]


def test_no_two_characters_look_alike_and_an_unknown_one_is_a_box():
    assert len(set(_GLYPHS.values())) == len(_GLYPHS)
    assert torch.equal(drawn("a"), drawn("A"))
    assert torch.equal(drawn("\u00e9"), drawn("\u00fc"))
    assert drawn("\u00e9").any()


def test_a_text_stays_in_its_box_also_when_it_goes_upwards():
    for options, rows, columns in (
        ({}, slice(10, 10 + CHAR_HEIGHT), slice(10, 10 + text_width("xyz"))),
        ({"upwards": True}, slice(40 - 3 * CHAR_WIDTH, 40), slice(10, 10 + CHAR_HEIGHT)),
    ):
        picture = blank(60, 60)
        draw_text(picture, 10, 40 if options else 10, "xyz", **options)
        inside = picture[:, rows, columns]
        assert (inside == INK).sum() == (picture == INK).sum() > 0
