"""What stands on the screen: plain lines, the live line, tables."""

import io
import os
import re
import select
import sys
from contextlib import redirect_stdout

import pytest

from fsdmoe.observe import print_table
from fsdmoe.observe.console import Screen, live_figures, make_console, plain_line, worst_imbalance
from fsdmoe.observe.metrics import row_scalars

ROW = {
    "step": 120, "tokens": 491520, "loss": 3.21456, "lr": 3e-4, "grad_norm": 1.234, "tokens_per_s": 62_900.0,
    "tflops": 340.2, "mfu": 0.3438, "memory_gib": 86.04, "seconds": 1.0, "skipped": 0,
    "experts": {"layers.0": {"max_over_mean": 1.25}, "layers.1": {"max_over_mean": 1.75},
                "layers.2": {"max_over_mean": None}},
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch):
    for encoding, written in (("ascii", rb"\xfc \u23ce"), ("latin-1", "ü ".encode("latin-1") + rb"\u23ce")):
        output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", output)
        make_console().print("ü \u23ce")
        output.flush()
        assert output.buffer.getvalue().rstrip() == written


def test_a_plain_line_tells_everything_on_one_line():
    line = plain_line(ROW, 2000, 200.0)
    assert line == (
        "step  120/2000 | loss  3.2146 | lr 3.00e-04 | grad norm   1.23 |  62.9k tok/s |    340 TFLOP/s "
        "| MFU 34.4% | 86.04 GiB | load max/mean 1.75 | ETA 3:20"
    )


def test_unknown_figures_and_skipped_steps_are_said():
    bare = {key: value for key, value in ROW.items() if key != "experts"}
    line = plain_line(bare | {"loss": None, "mfu": None, "tokens_per_s": None, "skipped": 2}, 2000, None)
    assert "loss     n/a" in line
    assert "MFU   n/a" in line
    assert "skipped 2" in line
    assert "load" not in line
    assert worst_imbalance(bare) is None


def test_buffers_of_the_flex_dispatcher_are_said_and_repeated_steps_where_there_are_any():
    exchange = {"fill": 0.83, "repeated": 0, "rerouted": 0}
    assert "| buffers 83.0% full | ETA" in plain_line(ROW | {"exchange": exchange}, 2000, 200.0)
    repeated = plain_line(ROW | {"exchange": exchange | {"repeated": 2}}, 2000, 200.0)
    assert "| buffers 83.0% full | repeated 2 | ETA" in repeated


def test_margin_and_accuracy_of_rewards_are_said_where_pairs_are_trained_on():
    row = ROW | {"reward_margin": 0.25, "reward_accuracy": 0.875}
    assert "| margin 0.250 | accuracy 87.5% |" in plain_line(row, 2000, 200.0)
    assert "loss 3.2146  margin 0.250  accuracy 87.5%  62.9k" in live_figures(row, 200.0)
    assert row_scalars(row)["train/reward_accuracy"] == 0.875


def test_the_live_line_has_the_figures_that_matter_and_leaves_out_an_unknown_mfu():
    assert live_figures(ROW, 200.0) == "loss 3.2146  62.9k tok/s  340 TFLOP/s  MFU 34.4%  86.0 GiB  ETA 3:20"
    assert "MFU" not in live_figures(ROW | {"mfu": None}, 200.0)


@pytest.mark.parametrize("progress", ["auto", "off"])
def test_into_a_pipe_go_plain_lines_without_escapes(capsys, progress):
    screen = Screen(progress, total_steps=2000)
    screen.advance(119, 3.0, 5.0)
    screen.show(ROW, 200.0)
    screen.note("saved [checkpoint] 120")
    screen.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [plain_line(ROW, 2000, 200.0), "saved [checkpoint] 120"]


@pytest.mark.parametrize("progress", ["off", "on"])
def test_a_run_outlives_the_reader_of_its_lines(progress, caplog):
    caplog.set_level("INFO")
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, redirect_stdout(stream):
        screen = Screen(progress, total_steps=2000)
        screen.note("read")
        os.close(reading)
        screen.note("lost")
        screen.show(ROW, 200.0)
        screen.close()
        print("by somebody else", flush=True)
    assert "the reader of the standard output is gone" in caplog.text


def test_a_long_note_is_not_folded(capsys):
    screen = Screen("off", total_steps=1)
    screen.note("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"


def test_the_live_line_moves_on_and_notes_stand_above_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    screen = Screen("on", total_steps=200, start_step=100)
    screen.show(ROW, 5.0)
    screen.note("a note [in brackets]")
    screen.advance(121, 2.5, 5.0)
    screen.close()
    screen.note("after the end")
    lines = [
        line.strip() for line in ESCAPES.sub("", capsys.readouterr().out).replace("\r", "\n").split("\n")
    ]
    lines = [line for line in lines if line]
    assert lines[0].startswith("step 100/200")
    assert "a note [in brackets]" in lines  # whole, nothing of the live line before or after it
    assert lines[-2].startswith("step 121/200")
    assert "loss 2.5000  62.9k tok/s" in lines[-2], "the newest loss beside the last row's speed"
    assert lines[-1] == "after the end"


def everything(leader: int) -> str:
    """All that a terminal was sent; it arrives in pieces."""
    shown = b""
    while select.select([leader], [], [], 0.5)[0]:
        shown += os.read(leader, 65536)
    return shown.decode()


@pytest.mark.parametrize(("term", "live"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_gets_the_live_line_if_it_can_show_one(monkeypatch, term, live):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "200")
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal, redirect_stdout(terminal):
        screen = Screen("auto", total_steps=2000)
        screen.show(ROW, 200.0)
        screen.close()
        terminal.flush()
        shown = everything(leader)
    os.close(leader)
    assert ("step 120/2000" in shown) == live
    assert (plain_line(ROW, 2000, 200.0) in shown) == (not live)


def test_a_table_shows_every_cell_with_numbers_on_the_right(capsys):
    print_table("Meshes [dense]", ["axis", "size"], [("dp_shard", 32), ("ep", 4), ("[0, 1]", 256)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Meshes [dense]"
    cells = [re.split(r"[│┃|]", line)[1:-1] for line in lines if re.match(r"[│┃|]", line)]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["axis", "size"],
        ["dp_shard", "32"],
        ["ep", "4"],
        ["[0, 1]", "256"],
    ]
    assert len({len(row[1].rstrip()) for row in cells[1:]}) == 1


def test_a_table_with_a_ragged_row_is_refused():
    with pytest.raises(ValueError, match="expected 1 cells a row, got 2"):
        print_table("Meshes", ["axis"], [("ep", 4)])
