"""Runs next to each other, from what is in their folders: a table, the differences of their configurations,
and one HTML page with curves.

    metrics.jsonl                   curves and figures
    config.toml                     differences (read by the caller: configurations are of a higher floor)
    tensorboard/expert_load.npz     heat maps of the experts' loads
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.console import worst_imbalance
from fsdmoe.observe.heatmap import LoadHistory
from fsdmoe.observe.history import History, best, median
from fsdmoe.observe.metrics import Row, read_metrics
from fsdmoe.observe.summary import LAST_ROWS
from fsdmoe.observe.text import UNKNOWN, duration, number, percent, short

METRICS = "metrics.jsonl"
LOADS = "tensorboard/expert_load.npz"
PAGE = Path(__file__).with_name("compare.html")
OVER = {"steps": "step", "tokens": "tokens", "minutes": "minutes in training steps"}
EVALUATED = ("train.eval_batches", "train.global_batch_size")
"""Keys outside of the data section that decide which rows are evaluated."""
NOT_EVALUATED = (
    "shuffle", "piece_len", "cursors", "num_workers", "prefetch", "pin_memory", "on_change", "cache_dir",
)  # fmt: skip
"""Keys of the data section that do not."""
MOST_LAYERS = 8  # whose heat maps a page shows


class Chart(NamedTuple):
    """One of the page."""

    heading: str
    key: str
    """Of a row."""
    unit: str
    over: str = "steps"
    is_smoothed: bool = True
    """With a running mean."""
    from_zero: bool = False


CHARTS = (
    Chart("Loss over steps", "loss", "loss"),
    Chart("Loss over tokens", "loss", "loss", "tokens"),
    Chart("Loss over minutes", "loss", "loss", "minutes"),
    Chart("Throughput", "tokens_per_s", "tokens/s, all ranks", from_zero=True),
    Chart("Peak memory", "memory_gib", "GiB, first rank", is_smoothed=False, from_zero=True),
    Chart("Gradient norm", "grad_norm", "norm before clipping"),
    Chart("Expert load", "imbalance", "busiest over mean, worst layer"),
    Chart("Experts without tokens", "dead", "share of all", is_smoothed=False, from_zero=True),
    Chart("Learning rate", "lr", "learning rate", is_smoothed=False, from_zero=True),
)


@dataclass(frozen=True)
class ComparedRun:
    """One of them."""

    name: str
    rows: Sequence[Row]
    """Of its metrics."""
    config: Mapping[str, Any] | None
    """By dotted key; none where the run kept none."""
    loads: LoadHistory
    changes: Sequence[str] = ()
    """Of its configuration, which is that of the last start: what each later start changed."""

    @cached_property
    def history(self) -> History:
        history = History()
        for row in self.rows:
            history.add(row)
        return history

    @cached_property
    def steps(self) -> list[Row]:
        """The rows of steps, with what is drawn over and of them."""
        found: list[Row] = []
        seconds = 0.0
        for row in self.rows:
            if "loss" in row:
                seconds += row.get("seconds") or 0.0
                drawn = {"steps": row["step"], "minutes": seconds / 60, "imbalance": worst_imbalance(row)}
                found.append(row | drawn | {"dead": dead_share(row.get("experts", {}))})
        return found

    def points(self, over: str, key: str) -> NDArray[np.float64]:
        """What is known of a key, as pairs."""
        known = [(row[over], row[key]) for row in self.steps if row.get(key) is not None]
        return np.array(known, dtype=np.float64).reshape(-1, 2)

    def evals(self, over: str) -> NDArray[np.float64]:
        """Evaluations, between the rows around them."""
        steps, places = self.points("steps", over).T
        if not len(steps):
            return np.zeros((0, 2))
        found = np.array(self.history.evals, dtype=np.float64).reshape(-1, 2)
        return np.stack([np.interp(found[:, 0], steps, places), found[:, 1]], axis=1)


def read_run(
    folder: Path, name: str, config: Mapping[str, Any] | None, changes: Sequence[str] = ()
) -> ComparedRun:
    """A run that has ended, or one that is going on.

    Raises:
        ConfigError: The folder has no metrics.
    """
    path = folder / METRICS
    if not path.is_file():
        raise ConfigError(
            f"{folder}: expected the folder of a run, found no {METRICS} in it; name folders as "
            "train.output_dir does, such as runs/quickstart"
        )
    rows = read_metrics(path)
    last = max((row["step"] for row in rows), default=0)
    return ComparedRun(
        name, rows, config, LoadHistory.load(folder / LOADS, max_columns=256, until=last), changes
    )


def figures(run: ComparedRun) -> dict[str, str]:
    """The run in a dozen numbers."""
    history = run.history
    best_eval = best(history.evals)
    return {
        "steps": str(history.last_step),
        "tokens": short(history.tokens),
        "loss, mean of the last rows": _last_loss(run),
        "evaluation loss, last": number(history.evals[-1].value if history.evals else None, ".4f"),
        "evaluation loss, best": f"{best_eval.value:.4f} at step {best_eval.step}" if best_eval else UNKNOWN,
        "tokens/s, median": short(median(history.speeds)),
        "TFLOP/s of a device, median": short(median(history.tflops)),
        "MFU, median": percent(median(history.mfus)),
        "time in training steps": duration(history.seconds),
        "peak memory": f"{history.peak_memory_gib:.2f} GiB",
        "busiest expert over mean, worst layer": number(worst_imbalance({"experts": history.experts}), ".2f"),
        "experts without tokens": percent(dead_share(history.experts)),
        "skipped steps": str(history.skipped),
    }


def dead_share(experts: Mapping[str, Mapping[str, float | None]]) -> float | None:
    """Share of all layers' experts that received nothing."""
    known = [share for each in experts.values() if (share := each["dead_fraction"]) is not None]
    return sum(known) / len(known) if known else None


def table(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Rows of figures: what, then a cell for each run."""
    columns = [figures(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    at = next(i for i, row in enumerate(rows) if row[0].startswith("loss,")) + 1
    return [*rows[:at], *_equal_losses(runs), *rows[at:]]


def _equal_losses(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Losses up to the last step, and up to the last token, that all runs have seen."""
    found = []
    for over, ends in (
        ("steps", [run.history.last_step for run in runs]),
        ("tokens", [run.history.tokens for run in runs]),
    ):
        if len(set(ends)) > 1 and min(ends) > 0:
            cells = [_last_loss(run, over, min(ends)) for run in runs]
            upto = f"step {min(ends)}" if over == "steps" else f"{short(min(ends))} tokens"
            found.append([f"loss, mean of the last rows up to {upto}", *cells])
    return found


def _last_loss(run: ComparedRun, over: str = "steps", end: float = math.inf) -> str:
    """The mean of the last rows that are not past ``end``, with their number. Step 1 is the loss of the
    initial weights: in a short run it would lift the mean by itself."""
    known = [row["loss"] for row in run.steps if row["step"] > 1 and row[over] <= end]
    last = [loss for loss in known if loss is not None][-LAST_ROWS:]
    return f"{sum(last) / len(last):.4f} ({len(last)} rows)" if last else UNKNOWN


def held_out_note(runs: Sequence[ComparedRun]) -> str | None:
    """Why the evaluation losses of the runs cannot be compared, as far as their configurations tell; none
    where no two of them have any."""
    runs = [run for run in runs if run.history.evals]
    deciding = [
        key
        for key, *_ in differences(runs)
        if key in EVALUATED or (key.startswith("data.") and key.rpartition(".")[2] not in NOT_EVALUATED)
    ]
    if not deciding:
        return None
    return (
        f"Evaluation losses are not over the same rows (different {', '.join(deciding)}): evaluate the runs "
        "with --evaluate-only and one setting of these to compare them."
    )


def other_losses_note(runs: Sequence[ComparedRun]) -> str | None:
    """Which losses the runs are trained on, where these are not the same."""
    losses: dict[str, list[str]] = {}
    for run in runs:
        if run.config is not None:
            losses.setdefault(_loss_of(run.config), []).append(run.name)
    if len(losses) < 2:
        return None
    told = ", ".join(f"{loss} in {', '.join(names)}" for loss, names in losses.items())
    return f"Losses are not of the same kind ({told}): they do not compare."


def _loss_of(config: Mapping[str, Any]) -> str:
    kinds = [config.get("data.kind"), *(source.get("kind") for source in config.get("data.sources") or ())]
    return f"DPO ({config.get('preference.loss')})" if "preference" in kinds else "cross-entropy"


def notes(runs: Sequence[ComparedRun]) -> list[str]:
    """What to know before figures are compared."""
    changed = [f"The configuration of {run.name} changed {line}." for run in runs for line in run.changes]
    return changed + [note for note in (other_losses_note(runs), held_out_note(runs)) if note is not None]


def differences(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Keys of the configurations that differ, with a cell for each run; those of a run that kept none are
    unknown."""
    keys = dict.fromkeys(key for run in runs if run.config for key in run.config)
    found = []
    for key in keys:
        cells = [UNKNOWN if run.config is None else str(run.config.get(key, "not a key")) for run in runs]
        if key != "train.output_dir" and len({cell for cell in cells if cell != UNKNOWN}) > 1:
            found.append([key, *cells])
    return found


def least_even(run: ComparedRun) -> dict[str, Tensor]:
    """Counts over time of the layers that the last row calls least even."""
    last = run.history.experts
    ratio = {layer: last.get(layer, {}).get("max_over_mean") or 0.0 for layer in run.loads.counts()}
    chosen = sorted(ratio, key=lambda layer: ratio[layer], reverse=True)[:MOST_LAYERS]
    return {layer: counts for layer, counts in run.loads.counts().items() if layer in chosen}


def page(runs: Sequence[ComparedRun], *, is_live: bool = False) -> str:
    """The whole comparison as an HTML document that needs no other file; a live one asks its server for
    changes.

    Raises:
        ImportError: The extra ``charts`` is not installed.
    """
    from fsdmoe.observe.charts import Curve, curves_chart, load_chart

    charts = {}
    for chart in CHARTS:
        curves = [
            Curve(
                run.name,
                run.points(chart.over, chart.key),
                run.evals(chart.over) if chart.key == "loss" else None,
            )
            for run in runs
        ]
        charts[chart.heading] = curves_chart(
            curves,
            title=chart.heading,
            labels=(OVER[chart.over], chart.unit),
            is_smoothed=chart.is_smoothed,
            from_zero=chart.from_zero,
        )
    loads = {}
    for run in runs:
        if counts := least_even(run):
            first = run.loads.first_step
            last = run.loads.last_step
            title = f"Tokens of each expert over time: {run.name}"
            loads[run.name] = load_chart(counts, first_step=first, last_step=last, title=title)
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        PAGE.read_text(encoding="utf-8")
    )
    return template.render(
        runs=[run.name for run in runs], table=table(runs), differences=differences(runs), charts=charts,
        loads=loads, without_config=[run.name for run in runs if run.config is None], is_live=is_live,
        notes=notes(runs), most_layers=MOST_LAYERS,
    )  # fmt: skip
