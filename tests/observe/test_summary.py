"""The page that a run leaves behind."""

import re

import torch

from fsdmoe.observe.history import History, Point
from fsdmoe.observe.record import RunFacts
from fsdmoe.observe.summary import MOST_LAYERS, balance_table, summary_text

FACTS = RunFacts(
    flops_per_token=2.5e9, device=torch.device("cpu"), num_ranks=2, total_steps=30, tokens_per_step=1000,
    described={"preset": "quickstart"},
)  # fmt: skip


def figures(ratio):
    return {"max_over_mean": ratio, "cv": 0.5, "dead_fraction": 0.125, "entropy": 0.9}


def make_history():
    history = History()
    for step, loss, speed in ((10, 4.0, 50.0), (20, 2.0, 1000.0), (30, 3.0, 2000.0)):
        history.add({
            "step": step, "tokens": 1000 * step, "loss": loss, "tokens_per_s": speed, "tflops": speed / 1e3,
            "mfu": None, "memory_gib": 10 / step, "seconds": 100.0, "skipped": step // 20,
            "experts": {"layers.0": figures(1.5), "layers.1": figures(2.5)},
        })  # fmt: skip
        history.add({"step": step, "eval_loss": loss + 0.5})
    return history


def lines_of(text):
    """name -> value of all two-column lines."""
    matches = (re.match(r"  (\S+(?: \S+)*)\s{2,}(\S.*)", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def test_the_page_says_what_the_run_was_and_how_it_ended():
    text = summary_text(make_history(), FACTS, status="finished", elapsed_seconds=400.0)
    lines = lines_of(text)
    assert lines["status"] == "finished"
    assert lines["preset"] == "quickstart"
    assert lines["devices"] == "2 x CPU"
    assert "2.5 GFLOP a token" in lines["TFLOP/s"]
    assert lines["steps"] == "30 of 30"
    assert lines["tokens"] == "30000 (30k)"
    assert lines["final loss"] == "3.0000 at step 30; mean of the last 3 rows 3.0000"
    assert lines["best loss"] == "2.0000 at step 20"
    assert lines["eval loss"] == "3.5000 at step 30"
    assert lines["best eval loss"] == "2.5000 at step 20"
    assert lines["skipped steps"] == "1"
    assert lines["tokens/s"] == "1k (median, all ranks)"
    assert lines["MFU"] == "n/a"
    assert lines["time"] == "5:00 in steps, 6:40 since this start"
    assert lines["peak memory"] == "1.00 GiB (first rank)"
    assert "Expert balance at step 30" in text
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 110


def test_neither_the_mean_loss_nor_the_speed_counts_step_1():
    history = History()
    for step, loss, speed in ((1, 11.0, 10.0), (10, 4.0, 1000.0), (20, 2.0, 3000.0)):
        history.add({"step": step, "loss": loss, "tokens_per_s": speed})
    lines = lines_of(summary_text(history, FACTS, status="finished", elapsed_seconds=1.0))
    assert lines["final loss"] == "2.0000 at step 20; mean of the last 2 rows 3.0000"
    assert lines["tokens/s"] == "2k (median, all ranks)"


def test_a_run_of_one_step_shows_its_loss_without_a_mean():
    history = History()
    history.add({"step": 1, "loss": 11.0})
    lines = lines_of(summary_text(history, FACTS, status="finished", elapsed_seconds=1.0))
    assert lines["final loss"] == "11.0000 at step 1"


def test_a_run_that_logged_nothing_still_has_its_page():
    text = summary_text(History(), FACTS, status="failed: out of memory", elapsed_seconds=1.0)
    lines = lines_of(text)
    assert lines["status"] == "failed: out of memory"
    assert lines["final loss"] == lines["eval loss"] == "none"
    assert "Expert balance" not in text


def test_many_layers_are_cut_to_the_least_even_ones():
    experts = {f"layers.{index}": figures(1.0 + (index * 7 % 40) / 10) for index in range(40)}
    table = balance_table(experts)
    shown = [line.split()[0] for line in table if line.startswith("layers.")]
    worst = sorted(experts, key=lambda layer: -experts[layer]["max_over_mean"])[:MOST_LAYERS]
    assert sorted(shown) == sorted(worst)
    mean = next(line for line in table if line.startswith("mean of 40 layers"))
    assert "2.950" in mean


def test_undefined_figures_do_not_break_the_table():
    table = balance_table({"layers.0": dict.fromkeys(("max_over_mean", "cv", "dead_fraction", "entropy"))})
    assert table[1].split() == ["layers.0", "n/a", "n/a", "n/a", "n/a"]


def test_losses_that_are_not_finite_leave_the_curve_and_an_evaluation_repeated_replaces():
    history = History()
    history.add({"step": 1, "loss": None})
    history.add({"step": 2, "loss": 2.0})
    history.add({"step": 2, "eval_loss": 3.0})
    history.add({"step": 2, "eval_loss": 2.9})
    assert history.losses == [Point(2, 2.0)]
    assert history.evals == [Point(2, 2.9)]
